"""Detached requests at their client: given up without being stopped, taken up by a new process."""

from typing import cast

import pytest

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Placement
from rolloutbus.bus.wire.errors import DeadlineExceeded, PeerLost, Refused
from rolloutbus.bus.wire.messages.endings import Ack
from rolloutbus.bus.wire.messages.generation import (
    Attach,
    Generate,
    Repair,
    Repaired,
    SamplingParams,
)
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.results import OnLoss
from tests.unit.trainer_adapter.bench import Bench, generated, ints, logprobs_of, problem

OLD = "c/7"
"""A request of an earlier process of this name."""


def _attach(bench: Bench, rid: str = OLD, *, is_followed: bool = False) -> None:
    ask = Ask("attach", Attach(), on_loss="fail", rid=rid, is_followed=is_followed)
    _, effects = bench.core.submit(ask, 60.0, bench.clock.now())
    bench.apply(effects)


def _detached(bench: Bench, on_loss: OnLoss = "resume") -> str:
    body = Generate(ints(1, 2, 3), SamplingParams(max_new_tokens=8))
    place = Placement("default", outlives_client=True)
    ask = Ask("generate", body, place=place, on_loss=on_loss)
    rid, effects = bench.core.submit(ask, 60.0, bench.clock.now())
    bench.apply(effects)
    return rid


def test_detached_request_that_nobody_waits_for_is_not_stopped(bench: Bench) -> None:
    rid = _detached(bench)
    bench.apply(bench.core.let_go(rid, bench.clock.now()))
    bench.pass_time(2)
    assert bench.take("abort") == []
    assert bench.core.n_open == 0


def test_its_ending_is_left_for_whoever_attaches(bench: Bench) -> None:
    rid = _detached(bench)
    bench.apply(bench.core.let_go(rid, bench.clock.now()))
    bench.finish(rid, (1, 1), generated(5))
    bench.pass_time(0.1)
    assert bench.acked() == []
    _attach(bench, rid)
    bench.finish(rid, (1, 1), generated(5))
    bench.pass_time(0.1)
    assert bench.acked() == [("worker:w0", rid, (1, 1))]
    assert bench.rollout(rid).tokens.tolist() == [5]


def _over(bench: Bench) -> list[tuple[str, list[str]]]:
    """(route, rids) of what was said to be over."""
    acks = [(entry.route, cast("Ack", unpack(entry))) for entry in bench.take("ack")]
    return [(route, ack.over) for route, ack in acks if ack.over]


def test_that_it_is_over_is_told_with_the_acknowledgement_and_to_each_new_router(
    bench: Bench,
) -> None:
    rid = _detached(bench)
    bench.finish(rid, (1, 1), generated(5))
    bench.pass_time(0.1)
    assert _over(bench) == [("worker:w0", [rid])]
    _detached(bench)
    bench.sent.clear()
    bench.welcome(epoch=2, instance="r2")
    kinds = [entry.kind for entry in bench.sent if entry.kind in ("ack", "generate")]
    assert kinds == ["ack", "generate"]
    assert _over(bench) == [("", [rid])]


def test_end_that_the_router_said_is_over_without_an_acknowledgement(bench: Bench) -> None:
    rid = _detached(bench)
    bench.say("expired", problem("deadline"), rid=rid)
    bench.pass_time(0.1)
    assert _over(bench) == [("", [rid])]


def test_nothing_is_over_that_may_still_be_collected(bench: Bench) -> None:
    impatient, refused = _detached(bench), OLD
    bench.accept(impatient, (1, 1))
    _attach(bench, refused)
    bench.refuse(refused, problem("unknown_request"))
    bench.pass_time(62)
    assert isinstance(bench.outcomes[impatient], DeadlineExceeded)
    bench.welcome(epoch=2, instance="r2")
    assert _over(bench) == []


def test_end_of_a_request_that_needs_its_caller_is_only_acknowledged(bench: Bench) -> None:
    rid = bench.generate()
    bench.finish(rid, (1, 1), generated(5))
    bench.pass_time(0.1)
    bench.welcome(epoch=2, instance="r2")
    assert _over(bench) == []


def test_deadline_of_the_caller_leaves_it_running(bench: Bench) -> None:
    _attach(bench)
    bench.accept(OLD, (1, 1))
    bench.pass_time(62)
    assert isinstance(bench.outcomes[OLD], DeadlineExceeded)
    assert bench.take("abort") == []


def test_other_requests_are_stopped_when_nobody_waits(bench: Bench) -> None:
    rid = bench.generate()
    bench.apply(bench.core.let_go(rid, bench.clock.now()))
    assert len(bench.take("abort")) == 1


def test_attached_stream_begins_with_what_was_missed(bench: Bench) -> None:
    _attach(bench, is_followed=True)
    (sent,) = bench.take("attach")
    assert sent.rid == OLD
    bench.accept(OLD, (1, 1))
    bench.row(OLD, (1, 1), 2, 7)
    (repair,) = bench.take("repair")
    bench.sent.append(repair)
    assert bench.bodies("repair", Repair) == [Repair(OLD, (1, 1), 0)]
    missed = Repaired(0, ints(5, 6), logprobs_of(5, 6), [(0, 2)])
    bench.answer_fleet(repair.rid, "finished", missed)
    assert [token for delta in bench.deltas for token in delta.tokens] == [5, 6, 7]
    bench.finish(OLD, (1, 1), generated(5, 6, 7, 8))
    assert bench.rollout(OLD).tokens.tolist() == [5, 6, 7, 8]
    assert bench.core.counters.stream_mismatches == 0


def test_attach_is_repeated_at_a_new_router(bench: Bench) -> None:
    _attach(bench)
    bench.take("attach")
    bench.welcome(epoch=2, instance="r2")
    assert [entry.rid for entry in bench.take("attach")] == [OLD]


def test_attached_request_that_is_lost_ends_as_lost(bench: Bench) -> None:
    _attach(bench)
    bench.accept(OLD, (1, 1))
    bench.lose(OLD, (1, 1))
    assert isinstance(bench.outcomes[OLD], PeerLost)


def test_what_nobody_holds_is_refused(bench: Bench) -> None:
    _attach(bench)
    bench.refuse(OLD, problem("unknown_request"))
    outcome = bench.outcomes[OLD]
    assert isinstance(outcome, Refused)
    assert outcome.code == "unknown_request"


def test_two_callers_cannot_attach_at_once(bench: Bench) -> None:
    _attach(bench)
    with pytest.raises(Refused):
        _attach(bench)


def test_second_collect_of_what_was_collected_is_refused_at_once(bench: Bench) -> None:
    _attach(bench)
    bench.finish(OLD, (1, 1), generated(5))
    bench.sent.clear()
    with pytest.raises(Refused) as caught:
        _attach(bench)
    assert caught.value.code == "unknown_request"
    assert "an earlier call" in str(caught.value)
    assert bench.take("attach") == []
    assert bench.core.n_open == 0


def test_collect_of_what_its_own_generate_returned_is_refused_at_once(bench: Bench) -> None:
    rid = _detached(bench)
    bench.finish(rid, (1, 1), generated(5))
    with pytest.raises(Refused, match="unknown_request"):
        _attach(bench, rid)


def test_a_loss_ends_for_good_what_its_caller_wants_sampled_only_once(bench: Bench) -> None:
    rid = _detached(bench, on_loss="fail")
    bench.accept(rid, (1, 1))
    _attach(bench)
    bench.accept(OLD, (1, 2))
    bench.lose(rid, (1, 1))
    bench.lose(OLD, (1, 2))
    bench.pass_time(0.1)
    assert isinstance(bench.outcomes[rid], PeerLost)
    assert isinstance(bench.outcomes[OLD], PeerLost)
    assert _over(bench) == [("", [rid])]  # an attached one may yet be taken up again
    with pytest.raises(Refused, match=r"unknown_request.*its result or its error"):
        _attach(bench, rid)
