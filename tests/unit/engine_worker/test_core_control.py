"""The worker core under control: pauses, memory, weights, crashes, shutdown."""

import pytest

from rolloutbus.bus.actor.effects import Stop
from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.wire.codec import pack, unpack, unpack_result
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.control import (
    FlushCache,
    Flushed,
    Memory,
    Pause,
    Resume,
    Shutdown,
    Sleep,
)
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.generation import Abort
from rolloutbus.bus.wire.messages.host import EngineFailure, EngineReady
from rolloutbus.bus.wire.messages.membership import Goodbye, Heartbeat
from rolloutbus.bus.wire.messages.weights import (
    CheckWeights,
    Committed,
    CommitUpdate,
    GetWeights,
    Prepared,
    PrepareUpdate,
)
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.engine_worker.worker.effects import KillHost, StartHost
from tests.unit.engine_worker.core_bench import Bench


@pytest.mark.parametrize("bulk", ["tcp://127.0.0.1:7005", "ipc:///run/bulk"])
def test_a_store_that_serves_another_host_only_is_told_at_once(bulk: str) -> None:
    keys = SecuritySettings(key_file="w.key", server_keys=["ab" * 32])
    bench = Bench(WorkerSettings("w0", "tcp://10.0.0.1:7778", security=keys))
    bench.join()
    bench.command("prepare_update", "c/1@w0", PrepareUpdate("default", 1, bulk))
    assert bench.said.problem("c/1@w0")[:2] == ("refused", "no_store")
    assert not bench.said.to_host("prepare_update")


def test_paused_worker_refuses_new_requests_until_resumed(bench: Bench) -> None:
    bench.command("pause", "c/1@w0", Pause("in_place"))
    assert bench.core.state == "paused"
    bench.generate("c/2")
    assert bench.said.problem("c/2")[:2] == ("refused", "not_ready")
    bench.host_ends("finished", "c/1@w0", Done())
    bench.command("resume", "c/3@w0", Resume())
    bench.host_ends("finished", "c/3@w0", Done())
    assert bench.core.state == "ready"
    assert bench.said.heartbeat().state == "ready"


def test_resume_overtakes_a_pause_that_drains(bench: Bench) -> None:
    bench.command("pause", "c/1@w0", Pause("drain"))
    bench.command("pause", "c/2@w0", Pause("drain"))
    bench.command("resume", "c/3@w0", Resume())
    assert [e.rid for e in bench.said.to_host("pause")] == ["c/1@w0"]
    assert [e.rid for e in bench.said.to_host("resume")] == ["c/3@w0"]
    bench.host_ends("finished", "c/1@w0", Done())
    assert [e.rid for e in bench.said.to_host("pause")] == ["c/1@w0", "c/2@w0"]


def test_a_pause_that_waited_pauses_the_worker_though_it_was_resumed_meanwhile(
    bench: Bench,
) -> None:
    for rid in ("c/1@w0", "c/2@w0"):
        bench.command("pause", rid, Pause("drain"))
    bench.command("resume", "c/3@w0", Resume())
    bench.host_ends("finished", "c/3@w0", Done())
    bench.host_ends("finished", "c/1@w0", Done())
    assert bench.said.heartbeat().state == "paused"


@pytest.mark.parametrize("was_paused", [True, False])
def test_a_pause_that_fails_changes_nothing(bench: Bench, *, was_paused: bool) -> None:
    if was_paused:
        bench.command("pause", "c/1@w0", Pause("retract"))
        bench.host_ends("finished", "c/1@w0", Done())
    bench.command("pause", "c/2@w0", Pause("in_place"))
    bench.host_ends("failed", "c/2@w0", Problem("unsupported", "no", "not_started"))
    assert bench.said.heartbeat().state == ("paused" if was_paused else "ready")


def test_a_request_that_is_aborted_twice_at_once_ends_once(bench: Bench) -> None:
    bench.generate("c/1")
    bench.command("abort", "c/2", Abort(["c/1", "c/1"]))
    assert bench.said.ending("c/1").kind == "cancelled"
    assert bench.said.ending("c/2").kind == "finished"


def test_sleep_waits_for_nobody_and_refuses_while_requests_run(bench: Bench) -> None:
    bench.generate("c/1")
    bench.command("sleep", "c/2@w0", Sleep(["kv_cache"]))
    assert bench.said.problem("c/2@w0")[:2] == ("refused", "busy")
    bench.step({"c/1": [1]}, {"c/1": "stop"})
    bench.command("sleep", "c/3@w0", Sleep(["kv_cache"]))
    bench.host_ends("finished", "c/3@w0", Memory({"kv_cache": 9}, ["kv_cache"]))
    assert bench.said.heartbeat().state == "asleep"


def test_sleep_that_fails_leaves_the_worker_awake(bench: Bench) -> None:
    bench.command("sleep", "c/1@w0", Sleep(["kv_cache"]))
    bench.generate("c/2")
    assert bench.said.problem("c/2")[:2] == ("refused", "not_ready")
    bench.host_ends("failed", "c/1@w0", Problem("engine_failed", "no", "failed"))
    assert bench.said.heartbeat().state == "ready"


def test_missing_capability_is_unsupported(new: Bench) -> None:
    bare = EngineReady("bare", 64, 128, 4, [], ["pause", "resume"])
    new.host(Entry("engine_ready", body=pack(bare)))
    new.lease()
    new.command("sleep", "c/1@w0", Sleep(["weights"]))
    assert new.said.problem("c/1@w0")[:2] == ("failed", "unsupported")


def test_commit_raises_the_attested_version_at_once(bench: Bench) -> None:
    bench.command("prepare_update", "c/1@w0", PrepareUpdate("default", 4, "ipc:///bulk"))
    bench.host_ends("finished", "c/1@w0", Prepared(4, 10, "shm", 1.0))
    bench.command("commit_update", "c/2@w0", CommitUpdate("default", 4, "keep"))
    assert bench.core.state == "updating"
    bench.host_ends("finished", "c/2@w0", Committed(4, 1.5))
    assert (bench.said.heartbeat().version, bench.said.heartbeat().stalled_ms) == (4, 1.5)
    assert bench.said.heartbeat().durations["update_stall"].total_s == 0.0015
    bench.generate("c/3", versions="min:4")
    assert [e.rid for e in bench.said.to_host("generate")] == ["c/3"]


def test_update_to_the_active_version_succeeds_without_the_engine(bench: Bench) -> None:
    bench.version = 4
    bench.engine_heartbeat()
    bench.command("commit_update", "c/1@w0", CommitUpdate("default", 4, "keep"))
    assert bench.said.ending("c/1@w0").kind == "finished"
    bench.command("prepare_update", "c/2@w0", PrepareUpdate("default", 3, "ipc:///bulk"))
    assert bench.said.problem("c/2@w0")[:2] == ("failed", "stale_version")
    assert bench.said.to_host("commit_update") == []


def test_commit_waits_for_requests_pinned_to_the_old_version(bench: Bench) -> None:
    bench.generate("c/1", versions="exact:0")
    bench.command("commit_update", "c/2@w0", CommitUpdate("default", 1, "keep"))
    assert bench.said.to_host("commit_update") == []
    assert bench.core.state == "updating"
    bench.generate("c/3", versions="exact:0")
    assert bench.said.problem("c/3")[:2] == ("refused", "not_ready")
    bench.step({"c/1": [1]}, {"c/1": "stop"})
    assert len(bench.said.to_host("commit_update")) == 1


def test_requests_pinned_to_the_old_version_do_not_start_while_the_engine_swaps(
    bench: Bench,
) -> None:
    bench.command("commit_update", "c/1@w0", CommitUpdate("default", 1, "keep"))
    assert len(bench.said.to_host("commit_update")) == 1
    bench.generate("c/2", versions="exact:0")
    bench.generate("c/3")
    assert bench.said.problem("c/2")[:2] == ("refused", "not_ready")
    assert [entry.rid for entry in bench.said.to_host("generate")] == ["c/3"]


def test_flush_cache_passes_the_hosts_answer_on(bench: Bench) -> None:
    bench.command("flush_cache", "c/1@w0", FlushCache())
    bench.host_ends("finished", "c/1@w0", Flushed(12))
    assert unpack_result("flush_cache", bench.said.ending("c/1@w0")) == Flushed(12)


def test_command_with_an_unknown_field_is_refused(bench: Bench) -> None:
    bench.command("flush_cache", "c/1@w0", Flushed(0))
    assert bench.said.problem("c/1@w0")[:2] == ("refused", "bad_request")


def test_crashed_host_takes_the_worker_off_the_bus_until_another_is_ready(bench: Bench) -> None:
    old = bench.core.member.epoch
    bench.generate("c/1")
    bench.collect(bench.core.host_exited("killed", bench.now))
    assert len(bench.said.sent("goodbye")) == 1
    assert isinstance(bench.said.effects[-1], StartHost)
    bench.join()
    assert bench.core.member.epoch != old
    assert bench.said.heartbeat().running == []


def test_engine_that_cannot_be_built_stops_the_worker(new: Bench) -> None:
    new.host(Entry("engine_failed", body=pack(EngineFailure("no such model"))))
    new.collect(new.core.host_exited("exit 1", new.now))
    assert new.said.effects[-1] == Stop("engine_failed: no such model")


def _goodbyes(bench: Bench) -> list[str]:
    bodies = [unpack(entry) for entry in bench.said.sent("goodbye")]
    return [body.reason for body in bodies if isinstance(body, Goodbye)]


def _dies(bench: Bench, *, was_killed: bool = False) -> None:
    bench.collect(bench.core.host_exited("SIGSOMETHING", bench.now, was_killed=was_killed))


def test_goodbye_tells_an_engine_that_died_from_one_that_was_killed(bench: Bench) -> None:
    _dies(bench)
    bench.join()
    _dies(bench, was_killed=True)
    assert _goodbyes(bench) == ["engine_crashed", "engine_killed"]


def test_engine_that_has_failed_takes_the_worker_off_the_bus_before_its_process_ends(
    bench: Bench,
) -> None:
    bench.generate("c/1")
    bench.host(Entry("engine_failed", body=pack(EngineFailure("a kernel failed"))))
    assert _goodbyes(bench) == ["engine_crashed: a kernel failed"]
    assert not any(isinstance(each, StartHost) for each in bench.said.effects[1:])
    bench.pass_time(1.0, heartbeats=False)
    _dies(bench)
    assert _goodbyes(bench) == ["engine_crashed: a kernel failed"]
    assert isinstance(bench.said.effects[-1], StartHost)
    bench.join()
    assert [rid for rid, *_ in _suspects(bench)] == ["c/1"]


def _suspects(bench: Bench) -> list[tuple[str, int, int]]:
    """Of all heartbeats since this was asked last."""
    heartbeats = [unpack(entry) for entry in bench.said.sent("beat")]
    bench.said.effects.clear()
    return [
        each
        for heartbeat in heartbeats
        if isinstance(heartbeat, Heartbeat)
        for each in heartbeat.suspects
    ]


def test_each_new_router_is_told_what_ran_when_the_engine_died(bench: Bench) -> None:
    bench.generate("c/1", deadline_s=100.0)
    bench.generate("c/2", deadline_s=100.0)
    _dies(bench)
    bench.join()
    assert _suspects(bench) == [("c/1", 1, 0), ("c/2", 1, 0)]
    bench.generate("c/3", deadline_s=100.0)
    _dies(bench)
    bench.join()
    assert _suspects(bench) == [("c/1", 1, 0), ("c/2", 1, 0), ("c/3", 1, 1)]
    bench.pass_time(1.0)
    assert _suspects(bench) == []  # once is enough for one router


def test_too_many_crashes_stop_the_worker(bench: Bench) -> None:
    for _ in range(5):
        _dies(bench)
        bench.join()
    _dies(bench)
    assert isinstance(bench.said.effects[-1], Stop)
    assert _goodbyes(bench)[-1] == "engine_failed: SIGSOMETHING"


def test_too_many_kills_stop_the_worker_and_are_charged_to_nobody(bench: Bench) -> None:
    for _ in range(5):
        _dies(bench, was_killed=True)
        bench.join()
    _dies(bench, was_killed=True)
    assert bench.said.effects[-1] == Stop("engine_failed: SIGSOMETHING")
    assert set(_goodbyes(bench)) == {"engine_killed"}


def test_worker_whose_engine_does_not_start_again_comes_back_to_say_so(bench: Bench) -> None:
    for _ in range(6):
        _dies(bench)
        bench.pass_time(100.0, heartbeats=False)
    assert _goodbyes(bench) == ["engine_crashed"]
    bench.said.effects.clear()
    _dies(bench)
    assert [entry.epoch for entry in bench.said.sent("hello")] == [bench.core.member.epoch]
    assert bench.said.heartbeat().state == "broken"
    assert _goodbyes(bench) == ["engine_failed: SIGSOMETHING"]
    assert bench.said.effects[-1] == Stop("engine_failed: SIGSOMETHING")


def test_silent_host_keeps_new_requests_away_until_it_speaks(bench: Bench) -> None:
    bench.generate("c/1", deadline_s=100.0)
    bench.pass_time(2.0, heartbeats=False)
    assert bench.said.heartbeat().state == "frozen"
    assert bench.said.heartbeat().running != []
    bench.step({"c/1": [1]}, {"c/1": "stop"})
    assert bench.said.heartbeat().state == "ready"
    assert bench.said.ending("c/1").kind == "finished"


def test_command_for_a_silent_host_waits_for_it(bench: Bench) -> None:
    bench.pass_time(2.0, heartbeats=False)
    bench.generate("c/1")
    bench.command("flush_cache", "c/2@w0", FlushCache())
    assert bench.said.to_host("generate") != []
    bench.host_ends("finished", "c/2@w0", Flushed(12))
    assert bench.said.ending("c/2@w0").kind == "finished"
    assert bench.said.heartbeat().state == "ready"


def test_sleeping_worker_with_a_silent_host_still_sleeps(bench: Bench) -> None:
    bench.command("sleep", "c/1@w0", Sleep(["kv_cache"]))
    bench.pass_time(2.0, heartbeats=False)
    assert bench.said.heartbeat().state == "asleep"


def test_weight_update_that_takes_long_does_not_end_the_host(bench: Bench) -> None:
    bench.command("commit_update", "c/1@w0", CommitUpdate("default", 1, "keep"), None, 500.0)
    bench.pass_time(200.0, heartbeats=False)
    assert bench.said.heartbeat().state == "frozen"
    bench.host_ends("finished", "c/1@w0", Committed(1, 1.5))
    bench.pass_time(1.0)
    assert not any(isinstance(effect, KillHost) for effect in bench.said.effects)
    assert bench.said.heartbeat().state == "ready"


def test_engine_without_progress_is_killed_only_while_it_has_work(bench: Bench) -> None:
    bench.pass_time(40.0)
    assert not any(isinstance(effect, KillHost) for effect in bench.said.effects)
    bench.generate("c/1", deadline_s=100.0)
    bench.pass_time(31.0)
    assert KillHost("the engine makes no progress") in bench.said.effects


def test_an_engine_that_is_paused_is_not_killed_though_its_worker_is_to_leave() -> None:
    bench = Bench(drain_s=120.0)
    bench.join()
    bench.generate("c/1", deadline_s=300.0)
    bench.command("pause", "c/2@w0", Pause("in_place"))
    bench.host_ends("finished", "c/2@w0", Done())
    bench.told_to_leave()
    bench.pass_time(60.0)
    assert not any(isinstance(effect, KillHost) for effect in bench.said.effects)


def test_an_engine_without_progress_is_killed_while_a_commit_waits_for_its_requests(
    bench: Bench,
) -> None:
    bench.generate("c/1", versions="exact:0", deadline_s=300.0)
    bench.command("commit_update", "c/2@w0", CommitUpdate("default", 1, "keep"), None, 300.0)
    bench.pass_time(31.0)
    assert KillHost("the engine makes no progress") in bench.said.effects


def test_host_that_does_not_answer_is_killed(bench: Bench) -> None:
    bench.pass_time(31.0, heartbeats=False)
    assert KillHost("the engine host does not answer") in bench.said.effects


def test_shutdown_drains_says_so_and_leaves_after_the_acknowledgements(bench: Bench) -> None:
    bench.generate("c/1")
    bench.command("shutdown", "c/2@w0", Shutdown(drain=True))
    assert bench.said.heartbeat().state == "draining"
    bench.generate("c/3")
    assert bench.said.problem("c/3")[:2] == ("refused", "not_ready")
    bench.step({"c/1": [1]}, {"c/1": "stop"})
    assert bench.said.ending("c/2@w0").kind == "finished"
    bench.pass_time(2.1)
    assert isinstance(bench.said.effects[-1], Stop)


def test_shutdown_without_drain_cancels_what_runs(bench: Bench) -> None:
    bench.generate("c/1")
    bench.command("shutdown", "c/2@w0", Shutdown(drain=False))
    assert bench.said.ending("c/1").kind == "cancelled"
    assert bench.said.ending("c/2@w0").kind == "finished"


def torn(bench: Bench) -> None:
    """An update in place breaks off in between."""
    prepare = PrepareUpdate("default", 4, "ipc:///bulk", mode="overwrite")
    bench.command("prepare_update", "c/1@w0", prepare)
    bench.host_ends("finished", "c/1@w0", Prepared(4, 10, "tcp", 1.0))
    bench.command("commit_update", "c/2@w0", CommitUpdate("default", 4, "keep"))
    assert bench.said.heartbeat().state == "updating"
    bench.engine_heartbeat(torn=True)
    assert bench.said.heartbeat().state == "torn"
    bench.host_ends("failed", "c/2@w0", Problem("deadline", "no bytes", "failed"))


def test_torn_worker_attests_nothing_new_and_does_nothing_but_what_can_mend_it(
    bench: Bench,
) -> None:
    torn(bench)
    assert (bench.said.heartbeat().state, bench.said.heartbeat().version) == ("torn", 0)
    bench.generate("c/3")
    assert bench.said.problem("c/3")[:2] == ("refused", "not_ready")
    forbidden = {
        "check_weights": CheckWeights(),
        "get_weights": GetWeights("w", 0, 1),
        "pause": Pause("in_place"),
        "flush_cache": FlushCache(),
    }
    for n, (kind, body) in enumerate(forbidden.items()):
        bench.command(kind, f"c/{10 + n}@w0", body)
        assert bench.said.problem(f"c/{10 + n}@w0")[:2] == ("refused", "not_ready"), kind
    bench.command("sleep", "c/20@w0", Sleep(["kv_cache"]))
    assert len(bench.said.to_host("sleep")) == 1


def test_torn_worker_takes_even_the_version_that_it_had(bench: Bench) -> None:
    bench.version = 4
    bench.engine_heartbeat()
    bench.engine_heartbeat(torn=True)
    bench.command("prepare_update", "c/1@w0", PrepareUpdate("default", 4, "ipc:///bulk"))
    assert len(bench.said.to_host("prepare_update")) == 1
    bench.command("prepare_update", "c/2@w0", PrepareUpdate("default", 3, "ipc:///bulk"))
    assert bench.said.problem("c/2@w0")[:2] == ("failed", "stale_version")


def test_whole_version_makes_a_torn_worker_serve_again(bench: Bench) -> None:
    torn(bench)
    bench.command("commit_update", "c/3@w0", CommitUpdate("default", 5, "keep"))
    assert bench.said.heartbeat().state == "torn"
    bench.version = 5
    bench.engine_heartbeat()
    bench.host_ends("finished", "c/3@w0", Committed(5, 1.5))
    assert (bench.said.heartbeat().state, bench.said.heartbeat().version) == ("ready", 5)
    bench.generate("c/4")
    assert [e.rid for e in bench.said.to_host("generate")] == ["c/4"]


def test_torn_worker_does_not_sleep_while_it_is_being_mended(bench: Bench) -> None:
    torn(bench)
    bench.command("commit_update", "c/3@w0", CommitUpdate("default", 5, "keep"))
    bench.command("sleep", "c/4@w0", Sleep(["weights"]))
    assert bench.said.problem("c/4@w0")[:2] == ("refused", "update_in_progress")


def test_new_engine_is_whole_again(bench: Bench) -> None:
    torn(bench)
    _dies(bench)
    bench.join()
    assert (bench.said.heartbeat().state, bench.said.heartbeat().version) == ("ready", 0)
