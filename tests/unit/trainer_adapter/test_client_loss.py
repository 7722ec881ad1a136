"""What a client makes of lost workers, lost links and restarted routers."""

import msgspec
import pytest

from rolloutbus.bus.wire.errors import EngineFailed, PeerLost, RequestCancelled
from rolloutbus.bus.wire.messages.generation import Generate
from rolloutbus.bus.wire.messages.membership import Dismissed, Hello, Members
from rolloutbus.trainer_adapter.client.core.effects import Subscribe, Unsubscribe
from tests.unit.trainer_adapter.bench import Bench, generated, ints, logprobs_of, problem


def test_a_lost_request_resumes_with_tokens_logprobs_and_versions(bench: Bench) -> None:
    rid = bench.generate()
    bench.row(rid, (1, 1), 0, 5, 6, version=3)
    bench.row(rid, (1, 1), 2, 7, version=4)
    bench.take("generate")
    bench.pass_time(2.0)
    bench.lose(rid, (1, 1))
    (entry,) = bench.take("generate")
    assert entry.rid == rid
    assert entry.deadline_ms == 58_000
    bench.sent.append(entry)
    (body,) = bench.bodies("generate", Generate)
    assert body.prefix is not None
    assert body.prefix.tokens == ints(5, 6, 7)
    assert body.prefix.logprobs == logprobs_of(5, 6, 7)
    assert body.prefix.versions == [(3, 2), (4, 1)]
    bench.row(rid, (1, 2), 3, 8, version=4, worker="w1")
    bench.finish(
        rid, (1, 2), generated(5, 6, 7, 8, versions=[(3, 2), (4, 2)], n_resumed=3), worker="w1"
    )
    rollout = bench.rollout(rid)
    assert (rollout.n_attempts, rollout.n_resumed, rollout.worker) == (2, 3, "w1")
    assert bench.core.counters.resumed == 1
    assert bench.core.counters.stream_mismatches == 0


@pytest.mark.parametrize(("lora", "is_resumed"), [("judge", False), ("judge@5", True)])
def test_a_lost_request_goes_on_only_with_the_adapter_version_that_it_names(
    bench: Bench, lora: str, *, is_resumed: bool
) -> None:
    rid = bench.generate(lora=lora)
    bench.row(rid, (1, 1), 0, 5, 6)
    bench.take("generate")
    bench.lose(rid, (1, 1))
    (body,) = bench.bodies("generate", Generate)
    assert (body.lora, body.prefix is not None) == (lora, is_resumed)
    kept = generated(5, 6, 7, n_resumed=2 if is_resumed else 0)
    bench.finish(rid, (1, 2), msgspec.structs.replace(kept, lora="judge@5"), worker="w1")
    assert bench.rollout(rid).lora == "judge@5"


def test_what_no_worker_vouched_for_names_no_adapter(bench: Bench) -> None:
    rid = bench.generate(lora="judge")
    bench.finish(rid, (1, 1), generated(5))
    assert bench.rollout(rid).lora == ""


def test_tokens_beyond_a_gap_are_not_part_of_the_prefix(bench: Bench) -> None:
    rid = bench.generate()
    bench.row(rid, (1, 1), 0, 5)
    bench.row(rid, (1, 1), 3, 8)
    bench.take("generate")
    bench.lose(rid, (1, 1))
    (body,) = bench.bodies("generate", Generate)
    assert body.prefix is not None
    assert body.prefix.tokens == ints(5)


def test_a_resume_survives_a_second_loss(bench: Bench) -> None:
    rid = bench.generate()
    bench.row(rid, (1, 1), 0, 5)
    bench.lose(rid, (1, 1))
    bench.row(rid, (1, 2), 1, 6)
    bench.take("generate")
    bench.lose(rid, (1, 2))
    (body,) = bench.bodies("generate", Generate)
    assert body.prefix is not None
    assert body.prefix.tokens == ints(5, 6)


def test_an_ending_or_rows_of_a_lost_attempt_do_not_count(bench: Bench) -> None:
    rid = bench.generate(stream=True)
    bench.row(rid, (1, 1), 0, 5)
    bench.lose(rid, (1, 1))
    bench.row(rid, (1, 1), 1, 99)
    bench.finish(rid, (1, 1), generated(5, 99))
    assert rid not in bench.outcomes
    assert bench.core.counters.stale_endings == 1
    bench.finish(rid, (1, 2), generated(5, 6), worker="w1")
    assert bench.rollout(rid).tokens.tolist() == [5, 6]
    bench.pass_time(0.05)
    assert ("worker:w0", rid, (1, 1)) in bench.acked()


def test_losing_one_attempt_twice_resumes_once(bench: Bench) -> None:
    rid = bench.generate()
    bench.row(rid, (1, 1), 0, 5)
    bench.take("generate")
    bench.lose(rid, (1, 1))
    bench.lose(rid, (1, 1))
    assert len(bench.take("generate")) == 1


def test_losing_an_old_attempt_leaves_the_new_one_alone(bench: Bench) -> None:
    rid = bench.generate()
    bench.accept(rid, (1, 2))
    bench.take("generate")
    bench.lose(rid, (1, 1))
    assert bench.take("generate") == []


def test_retry_starts_again_without_a_prefix(bench: Bench) -> None:
    rid = bench.generate(on_loss="retry")
    bench.row(rid, (1, 1), 0, 5, 6)
    bench.take("generate")
    bench.lose(rid, (1, 1))
    (body,) = bench.bodies("generate", Generate)
    assert body.prefix is None


def test_fail_raises_peer_lost(bench: Bench) -> None:
    rid = bench.generate(on_loss="fail")
    bench.accept(rid, (1, 1))
    bench.lose(rid, (1, 1))
    error = bench.outcomes[rid]
    assert isinstance(error, PeerLost)
    assert error.outcome == "unknown"


def test_lost_workers_are_not_charged_but_engine_crashes_are(bench: Bench) -> None:
    rid = bench.generate()
    for n in range(1, 6):
        bench.lose(rid, (1, n))
    assert rid not in bench.outcomes
    for n in range(6, 11):
        assert rid not in bench.outcomes
        bench.lose(rid, (1, n), "engine_crashed")
    error = bench.outcomes[rid]
    assert isinstance(error, EngineFailed)
    assert error.code == "engine_crashed"


def test_crashes_of_a_whole_fleet_are_retried_no_faster_than_the_budget(bench: Bench) -> None:
    rids = [bench.generate() for _ in range(150)]
    for rid in rids:
        bench.accept(rid, (1, 1))
    bench.take("generate")
    for rid in rids:
        bench.lose(rid, (1, 1), "engine_crashed")
    assert len(bench.take("generate")) == 100
    bench.pass_time(11.0)
    late = {entry.rid for entry in bench.take("generate")}
    assert set(rids[100:]) <= late
    assert bench.outcomes == {}


def test_requests_of_lost_workers_are_sent_again_at_once_however_many(bench: Bench) -> None:
    rids = [bench.generate() for _ in range(150)]
    for rid in rids:
        bench.accept(rid, (1, 1))
    bench.take("generate")
    for rid in rids:
        bench.lose(rid, (1, 1))
    assert len(bench.take("generate")) == 150


def test_an_aborted_request_does_not_wait_for_its_retry(bench: Bench) -> None:
    rids = [bench.generate() for _ in range(101)]
    for rid in rids:
        bench.accept(rid, (1, 1))
        bench.lose(rid, (1, 1), "engine_crashed")
    bench.abort(rids[-1])
    assert isinstance(bench.outcomes[rids[-1]], RequestCancelled)


def test_a_request_stopped_by_somebody_else_goes_on_where_it_stopped(bench: Bench) -> None:
    rid = bench.generate()
    bench.accept(rid, (1, 1))
    bench.take("generate")
    bench.finish(rid, (1, 1), generated(5, 6, versions=[(2, 2)]), kind="cancelled")
    kinds = [entry.kind for entry in bench.sent if entry.kind in {"ack", "generate"}]
    assert kinds == ["ack", "generate"]
    (body,) = bench.bodies("generate", Generate)
    assert body.prefix is not None
    assert (body.prefix.tokens, body.prefix.versions) == (ints(5, 6), [(2, 2)])


def test_begun_work_waits_out_a_full_router(bench: Bench) -> None:
    rid = bench.generate()
    bench.row(rid, (1, 1), 0, 5)
    bench.lose(rid, (1, 1))
    bench.take("generate")
    bench.refuse(rid, problem("busy", retry_after_ms=100))
    bench.pass_time(1.0)
    assert len(bench.take("generate")) >= 1
    assert rid not in bench.outcomes


def test_hello_and_a_heartbeat_open_the_connection_and_heartbeats_go_on(seed: int) -> None:
    bench = Bench(seed)
    assert [entry.kind for entry in bench.sent] == ["hello", "client_beat"]
    (hello,) = bench.bodies("hello", Hello)
    assert (hello.role, hello.name) == ("client", "c")
    bench.welcome()
    bench.take("client_beat")
    bench.pass_time(5.0)
    assert 9 <= len(bench.take("client_beat")) <= 11
    assert bench.n_connects == 1


def test_requests_made_before_the_welcome_leave_with_it(seed: int) -> None:
    bench = Bench(seed)
    rid = bench.generate()
    assert bench.take("generate") == []
    bench.welcome()
    (entry,) = bench.take("generate")
    assert entry.rid == rid
    assert entry.place is not None
    assert not entry.place.resend


def test_a_silent_router_is_left_for_a_fresh_connection(bench: Bench) -> None:
    bench.router_answers_heartbeats = False
    bench.pass_time(1.4)
    assert bench.n_connects == 1
    bench.pass_time(0.5)
    assert bench.n_connects == 2
    bench.pass_time(60.0)
    assert 20 <= bench.n_connects <= 40  # silence of 1.5 s, then a wait of less than 1 s


def test_after_a_reconnect_open_requests_are_marked_as_possibly_running(bench: Bench) -> None:
    running, queued = bench.generate(), bench.generate()
    bench.row(running, (1, 1), 0, 5)
    bench.take("generate")
    bench.apply(bench.core.link_down(bench.clock.now()))
    fresh = bench.generate()
    bench.pass_time(0.2)
    assert bench.n_connects == 2
    assert bench.take("generate") == []
    bench.welcome(epoch=2, instance="r2")
    entries = {entry.rid: entry for entry in bench.take("generate")}
    assert [rid for rid, entry in entries.items() if entry.place and entry.place.resend] == [
        running,
        queued,
    ]
    assert set(entries) == {running, queued, fresh}
    bench.row(running, (1, 1), 1, 6)  # a worker went on with it all the time
    bench.finish(running, (1, 1), generated(5, 6))
    assert bench.rollout(running).n_attempts == 1


def test_a_new_attempt_after_a_restart_voids_what_it_did_not_start_from(bench: Bench) -> None:
    rid = bench.generate(stream=True)
    bench.row(rid, (1, 1), 0, 5, 6)
    bench.apply(bench.core.link_down(bench.clock.now()))
    bench.pass_time(0.2)
    bench.welcome(epoch=2, instance="r2")  # re-sent with [5, 6]
    bench.row(rid, (1, 1), 2, 7)  # the old worker still runs, then dies unnoticed
    bench.row(rid, (2, 1), 2, 8, worker="w1")
    bench.finish(rid, (2, 1), generated(5, 6, 8, 9), worker="w1")
    held: list[int] = []
    for delta in bench.deltas:
        held[delta.start :] = delta.tokens.tolist()
    assert held == bench.rollout(rid).tokens.tolist()


def test_an_aborted_request_is_aborted_again_after_a_reconnect(bench: Bench) -> None:
    rid = bench.generate()
    bench.accept(rid, (1, 1))
    bench.abort(rid)
    bench.sent.clear()
    bench.apply(bench.core.link_down(bench.clock.now()))
    bench.pass_time(0.2)
    bench.welcome(epoch=2, instance="r2")
    assert bench.take("generate") == []
    assert bench.take("abort")


def test_an_unknown_peer_says_hello_again_on_the_same_connection(bench: Bench) -> None:
    rid = bench.generate()
    bench.take("generate")
    bench.say("dismissed", Dismissed("unknown-peer", "say hello first"))
    assert [entry.kind for entry in bench.sent] == ["hello", "client_beat"]
    assert bench.n_connects == 1
    bench.welcome()
    assert [entry.rid for entry in bench.take("generate")] == [rid]


def test_a_router_of_the_past_is_ignored(bench: Bench) -> None:
    bench.welcome(epoch=5, instance="r5")
    bench.generate()
    bench.take("generate")
    bench.welcome(epoch=4, instance="r4")
    assert bench.take("generate") == []


@pytest.mark.parametrize("frozen_s", [2.0, 20.0])
def test_a_frozen_client_reads_before_it_judges_silence(bench: Bench, frozen_s: float) -> None:
    bench.clock.advance(frozen_s)
    bench.apply(bench.core.tick(bench.clock.now()))
    assert bench.n_connects == 1
    bench.pass_time(3.0)
    assert bench.n_connects == 1


def test_streams_of_members_are_followed_and_left_some_time_after_them(bench: Bench) -> None:
    member = bench.core.members[0]
    bench.say("members", Members([type(member)("w1", "b.1", "ipc:///w1", "live", 0, "default")]))
    bench.pass_time(5.0)
    assert not any(isinstance(effect, Unsubscribe) for effect in bench.effects)
    bench.pass_time(6.0)
    followed = [e for e in bench.effects if isinstance(e, (Subscribe, Unsubscribe))]
    assert followed == [Subscribe("ipc:///w0"), Subscribe("ipc:///w1"), Unsubscribe("ipc:///w0")]
