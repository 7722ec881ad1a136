"""Commands of a client: sent, re-sent, ended exactly once, acknowledged, aborted, too late."""

import msgspec
import numpy as np
import pytest

from rolloutbus.bus.wire.entry import Placement
from rolloutbus.bus.wire.errors import (
    ActorStopped,
    BusError,
    DeadlineExceeded,
    EngineFailed,
    PeerLost,
    Refused,
    RemoteProtocolError,
    RequestExpired,
    StaleVersion,
)
from rolloutbus.bus.wire.limits import MAX_BODY_BYTES
from rolloutbus.bus.wire.messages.control import FleetStatus, Pause, ServerFacts, Status
from rolloutbus.bus.wire.messages.endings import Done, Queued
from rolloutbus.bus.wire.messages.generation import Abort, Generate, PolicyAborted, SamplingParams
from rolloutbus.bus.wire.messages.membership import Dismissed, Lease, Member, Members
from rolloutbus.trainer_adapter.client.core.effects import PolicyUnserved, Stopped
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.results import (
    FleetCommandFailed,
    FleetResult,
    RolloutCancelled,
)
from tests.unit.trainer_adapter.bench import Bench, Wire, generated, ints, problem


def test_a_generate_is_sent_placed_by_the_router_and_ends_with_its_rollout(bench: Bench) -> None:
    rid = bench.generate()
    (entry,) = bench.take("generate")
    assert (entry.rid, entry.route, entry.deadline_ms) == (rid, "", 60_000)
    assert entry.place is not None
    assert not entry.place.resend
    bench.accept(rid, (1, 1))
    bench.finish(rid, (1, 1), generated(7, 8, 9, versions=[(0, 1), (4, 2)]))
    rollout = bench.rollout(rid)
    assert rollout.tokens.tolist() == [7, 8, 9]
    assert rollout.tokens.dtype == np.int32
    assert rollout.logprobs.dtype == np.float32
    assert rollout.token_versions.tolist() == [0, 4, 4]
    assert (rollout.worker, rollout.n_attempts, rollout.n_resumed) == ("w0", 1, 0)


def test_a_policy_that_no_worker_has_is_told_once_and_its_request_waits(bench: Bench) -> None:
    def asked(policy: str) -> list[PolicyUnserved]:
        bench.effects.clear()
        body = Generate(ints(1), SamplingParams(max_new_tokens=8))
        ask = Ask("generate", body, place=Placement(policy))
        bench.apply(bench.core.submit(ask, 60.0, bench.clock.now())[1])
        assert len(bench.take("generate")) == 1
        return [each for each in bench.effects if isinstance(each, PolicyUnserved)]

    assert asked("default") == []
    assert asked("defualt") == [PolicyUnserved("defualt", ["default"])]
    assert asked("defualt") == []
    critic = Member("w1", "b.1", "ipc:///w1", "live", 0, "critic")
    bench.say("members", Members([critic]))
    assert asked("critic") == []
    assert asked("default") == []  # its workers are lost: they were here
    bench.say("members", Members([]))
    assert asked("other") == []  # nobody is here: nobody can tell


def test_a_request_that_no_frame_can_hold_is_refused_and_never_sent(bench: Bench) -> None:
    with pytest.raises(Refused) as caught:
        bench.command("generate", Generate(bytes(MAX_BODY_BYTES), SamplingParams()))
    error = caught.value
    assert (error.code, error.outcome, error.field) == ("bad_request", "not_started", "prompt")
    assert bench.core.n_open == 0
    assert bench.take("generate") == []


def test_a_policy_that_somebody_aborted_ends_here_as_if_its_caller_had(bench: Bench) -> None:
    running, waiting = bench.generate(), bench.generate()
    bench.accept(running, (1, 1))
    bench.say("cancelled", rid=waiting)
    body = Generate(ints(1), SamplingParams(max_new_tokens=8))
    judge, effects = bench.core.submit(
        Ask("generate", body, place=Placement("judge")), 60.0, bench.clock.now()
    )
    bench.apply(effects)

    bench.say("policy_aborted", PolicyAborted("default"))
    assert [body.rids for body in bench.bodies("abort", Abort)] == [[running]]
    bench.finish(running, (1, 1), generated(7, 8), kind="cancelled")

    outcome = bench.outcomes[running]
    assert isinstance(outcome, RolloutCancelled)
    assert outcome.partial.tokens.tolist() == [7, 8]
    assert isinstance(bench.outcomes[waiting], RolloutCancelled)
    assert judge not in bench.outcomes


def test_rids_differ_between_processes_and_follow_the_protocol(bench: Bench) -> None:
    first, second = bench.generate(), bench.generate()
    assert first != second
    assert all(rid.startswith("c/") and rid[2:].isdecimal() for rid in (first, second))


@pytest.mark.parametrize("silenced_by", ["queued", "accepted", "ending"])
def test_a_command_is_sent_again_until_something_is_heard_of_it(
    bench: Bench, silenced_by: str
) -> None:
    rid = bench.generate()
    bench.pass_time(3.0)  # at 0, 1.0 and 2.5 s
    assert len(bench.take("generate")) == 3
    if silenced_by == "queued":
        bench.say("queued", Queued([rid]))
    elif silenced_by == "accepted":
        bench.accept(rid, (1, 1))
    else:
        bench.finish(rid, (1, 1), generated(7))
    bench.pass_time(10.0 if silenced_by != "accepted" else 4.0)
    assert bench.take("generate") == []


def test_a_running_request_is_sent_again_when_nobody_speaks_of_it(bench: Bench) -> None:
    rid = bench.generate()
    bench.accept(rid, (1, 1))
    bench.take("generate")

    bench.pass_time(6.0)

    [again] = bench.take("generate")
    assert again.rid == rid
    assert again.place is not None
    assert again.place.resend


def test_the_first_ending_wins_and_every_ending_is_acknowledged(bench: Bench) -> None:
    rid = bench.generate()
    bench.finish(rid, (1, 1), generated(7))
    bench.finish(rid, (1, 1), generated(7))
    bench.finish(rid, (1, 2), generated(8), worker="w1")
    assert bench.rollout(rid).tokens.tolist() == [7]
    assert bench.core.counters.stale_endings == 2
    bench.pass_time(0.05)
    assert bench.acked() == [
        ("worker:w0", rid, (1, 1)),
        ("worker:w0", rid, (1, 1)),
        ("worker:w1", rid, (1, 2)),
    ]


def test_acknowledgements_of_a_tick_travel_in_one_entry_per_worker(bench: Bench) -> None:
    rids = [bench.generate() for _ in range(20)]
    for n, rid in enumerate(rids):
        bench.finish(rid, (1, n + 1), generated(7), worker=f"w{n % 2}")
    bench.pass_time(0.05)
    assert [entry.route for entry in bench.take("ack")] == ["worker:w0", "worker:w1"]


def test_a_corrupted_result_is_an_error_not_a_rollout(bench: Bench) -> None:
    rid = bench.generate()
    result = generated(7, 8)
    bench.finish(rid, (1, 1), msgspec.structs.replace(result, tokens=ints(7, 9)))
    error = bench.outcomes[rid]
    assert isinstance(error, EngineFailed)
    assert error.code == "digest_mismatch"


def test_a_result_with_unequal_columns_is_a_protocol_error(bench: Bench) -> None:
    rid = bench.generate()
    bench.finish(rid, (1, 1), generated(7, 8, versions=[(0, 3)]))
    assert isinstance(bench.outcomes[rid], RemoteProtocolError)


@pytest.mark.parametrize(
    ("kind", "code", "error"),
    [
        ("refused", "bad_request", Refused),
        ("refused", "busy", Refused),
        ("refused", "version_unavailable", StaleVersion),
        ("refused", "stale_version", StaleVersion),
        ("failed", "engine_failed", EngineFailed),
        ("expired", "deadline", RequestExpired),
    ],
)
def test_endings_become_typed_errors(
    bench: Bench, kind: str, code: str, error: type[BusError]
) -> None:
    rid = bench.generate()
    bench.say(kind, problem(code), rid=rid)
    assert isinstance(bench.outcomes[rid], error)


def test_a_request_that_no_worker_was_ready_for_is_sent_again_until_its_deadline(
    bench: Bench,
) -> None:
    rid = bench.generate(deadline_s=5.0)
    for n in range(1, 4):
        bench.refuse(rid, problem("not_ready"), (1, n))
        bench.pass_time(1.5)
        assert bench.take("generate")
    assert rid not in bench.outcomes
    assert [rid for _, rid, _ in bench.acked()] == [rid] * 3
    bench.refuse(rid, problem("not_ready", retry_after_ms=9000), (1, 4))
    bench.refuse(rid, problem("not_ready"), (1, 4))  # its worker had not seen the ack
    bench.pass_time(0.6)
    error = bench.outcomes[rid]
    assert isinstance(error, Refused)
    assert error.code == "not_ready"
    assert bench.core.counters.stale_endings == 1


def test_at_its_deadline_a_deferred_request_raises_the_refusal(bench: Bench) -> None:
    rid = bench.generate(deadline_s=1.0)
    bench.refuse(rid, problem("not_ready", retry_after_ms=5000), (1, 1))
    bench.pass_time(1.1)
    error = bench.outcomes[rid]
    assert isinstance(error, Refused)
    assert error.outcome == "not_started"


def test_a_request_that_is_put_off_for_an_hour_is_sent_again_to_its_end(bench: Bench) -> None:
    rid = bench.generate(deadline_s=1e6)
    for n in range(1, 1500):
        bench.refuse(rid, problem("not_ready"), (1, n))
        while not bench.take("generate"):
            bench.pass_time(0.5)
    assert rid not in bench.outcomes


def test_busy_is_raised_unless_the_caller_waits_it_out(bench: Bench) -> None:
    raised, waited = bench.generate(), bench.generate(retries_busy=True)
    bench.take("generate")
    for rid in (raised, waited):
        bench.refuse(rid, problem("busy", retry_after_ms=300))
    assert isinstance(bench.outcomes[raised], Refused)
    bench.pass_time(0.1)
    assert bench.take("generate") == []
    bench.pass_time(0.5)
    assert [entry.rid for entry in bench.take("generate")] == [waited]


def test_acknowledgements_leave_before_the_same_rid_is_sent_again(bench: Bench) -> None:
    rid = bench.generate()
    bench.refuse(rid, problem("not_ready"), (1, 1))
    bench.sent.clear()
    bench.pass_time(1.0)
    kinds = [entry.kind for entry in bench.sent if entry.kind in {"ack", "generate"}]
    assert kinds[:2] == ["ack", "generate"]


def test_silence_past_the_deadline_raises_and_stops_the_request(bench: Bench) -> None:
    rid = bench.generate(deadline_s=2.0)
    bench.accept(rid, (1, 1))
    bench.pass_time(2.9)
    assert rid not in bench.outcomes
    bench.pass_time(0.2)
    assert isinstance(bench.outcomes[rid], DeadlineExceeded)
    assert [body.rids for body in bench.bodies("abort", Abort)] == [[rid]]


def test_an_abort_is_repeated_until_the_ending_comes_with_what_was_sampled(bench: Bench) -> None:
    rid = bench.generate()
    bench.accept(rid, (1, 1))
    assert bench.abort(rid) == 1
    bench.pass_time(2.2)
    aborts = bench.bodies("abort", Abort)
    assert len(aborts) >= 3
    assert all(body.rids == [rid] for body in aborts)
    bench.finish(rid, (1, 1), generated(7, 8), kind="cancelled")
    error = bench.outcomes[rid]
    assert isinstance(error, RolloutCancelled)
    assert error.partial.tokens.tolist() == [7, 8]


def test_an_abort_of_a_queued_request_brings_what_the_client_holds(bench: Bench) -> None:
    rid = bench.generate()
    bench.row(rid, (1, 1), 0, 5, 6)
    bench.lose(rid, (1, 1))
    bench.abort(rid)
    bench.say("cancelled", rid=rid)
    error = bench.outcomes[rid]
    assert isinstance(error, RolloutCancelled)
    assert error.partial.tokens.tolist() == [5, 6]
    assert error.partial.finish_reason == "abort"


def test_an_aborted_request_that_nobody_knows_ends_by_itself(bench: Bench) -> None:
    rid = bench.generate()
    bench.accept(rid, (1, 1))
    bench.abort()
    bench.pass_time(12.0)
    assert isinstance(bench.outcomes[rid], RolloutCancelled)


def test_an_aborted_request_is_not_resumed_when_its_worker_is_lost(bench: Bench) -> None:
    rid = bench.generate()
    bench.row(rid, (1, 1), 0, 5)
    bench.abort(rid)
    bench.take("generate")
    bench.lose(rid, (1, 1))
    assert isinstance(bench.outcomes[rid], RolloutCancelled)
    assert bench.take("generate") == []


def test_a_request_that_was_never_sent_ends_at_once_when_aborted(seed: int) -> None:
    bench = Bench(seed)  # not welcomed yet
    rid = bench.generate()
    bench.abort(rid)
    assert isinstance(bench.outcomes[rid], RolloutCancelled)
    bench.welcome()
    assert bench.take("generate") == []


def test_a_fleet_command_returns_a_result_or_an_error_for_each_worker(bench: Bench) -> None:
    done = bench.command("pause", Pause("drain"), route="fleet")
    bench.answer_fleet(done, "finished", Done(), "w7")
    result = bench.outcomes[done]
    assert isinstance(result, FleetResult)
    assert result.by_worker == {"w0": Done()}
    assert result.silent == ["w7"]
    with pytest.raises(FleetCommandFailed, match="1 of 2 targets did not do it: w7: no answer"):
        result.check()

    failed = bench.command("pause", Pause(), route="worker:w0")
    bench.answer_fleet(failed, "failed", problem("unsupported"))
    result = bench.outcomes[failed]
    assert isinstance(result, FleetResult)
    with pytest.raises(EngineFailed):
        result.only(ServerFacts)


def test_a_command_that_the_router_answers_returns_its_typed_result(bench: Bench) -> None:
    rid = bench.command("status", Status())
    status = FleetStatus(1, "r1", False, [], {}, 0, 0, 1, {})  # noqa: FBT003 - positional struct
    bench.say("finished", status, rid=rid)
    assert bench.outcomes[rid] == status


def test_closing_ends_every_request_and_tells_the_router(bench: Bench) -> None:
    rid = bench.generate()
    bench.apply(bench.core.close(bench.clock.now()))
    assert isinstance(bench.outcomes[rid], ActorStopped)
    assert len(bench.take("goodbye")) == 1
    with pytest.raises(ActorStopped):
        bench.generate()


def test_a_replaced_client_stops_and_fails_what_was_open(bench: Bench) -> None:
    rid = bench.generate()
    bench.say("dismissed", Dismissed("replaced", "a newer process has this name"))
    assert isinstance(bench.outcomes[rid], PeerLost)
    assert any(isinstance(effect, Stopped) for effect in bench.effects)
    with pytest.raises(PeerLost):
        bench.generate()


def test_malformed_and_unexpected_entries_are_counted_and_harm_nothing(bench: Bench) -> None:
    rid = bench.generate()
    bench.say("accepted", Pause())
    bench.say("beat", rid=rid, body=None)
    assert bench.core.counters.malformed_in == 1
    assert bench.core.counters.unexpected_in == 1
    assert rid not in bench.outcomes


def test_a_lost_welcome_is_asked_for_on_a_fresh_connection_although_heartbeats_are_answered() -> (
    None
):
    wire = Wire()
    for _ in range(12):
        wire.pass_time(0.25)
        wire.say("lease", Lease(1, "r", 1))
    assert wire.n_connects > 1
