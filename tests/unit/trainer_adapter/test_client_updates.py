"""A publication as the client's core sees it: its progress, and what becomes of an abort."""

from typing import cast

import pytest

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.errors import BusError, DeadlineExceeded, RequestCancelled
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Abort
from rolloutbus.bus.wire.messages.weights import PublishVersion, UpdateProgress, VersionPublished
from rolloutbus.trainer_adapter.client.core.effects import Report
from tests.unit.trainer_adapter.bench import Bench

BODY = PublishVersion("default", 7)
DONE = VersionPublished(7, [])


def publish(bench: Bench, deadline_s: float = 60.0) -> str:
    return bench.command("publish_version", BODY, deadline_s=deadline_s)


def aborted_rids(bench: Bench) -> list[str]:
    return [rid for entry in bench.take("abort") for rid in cast("Abort", unpack(entry)).rids]


def reports(bench: Bench) -> list[Report]:
    return [effect for effect in bench.effects if isinstance(effect, Report)]


def test_progress_reaches_whoever_publishes(bench: Bench) -> None:
    rid = publish(bench)
    progress = UpdateProgress(7, "committing", n_targets=3, n_prepared=3, n_active=1)
    bench.say("update_progress", progress, rid=rid)
    assert reports(bench) == [Report(rid, progress)]
    bench.say("finished", DONE, rid=rid)
    assert bench.outcomes[rid] == DONE


def test_progress_of_what_is_over_is_nobodys(bench: Bench) -> None:
    rid = publish(bench)
    bench.say("finished", DONE, rid=rid)
    bench.say("update_progress", UpdateProgress(7, "committed", 1), rid=rid)
    assert reports(bench) == []


@pytest.mark.parametrize("is_in_time", [True, False])
def test_an_abort_leaves_it_to_the_router_whether_it_is_in_time(
    bench: Bench, is_in_time: bool
) -> None:
    rid = publish(bench)
    assert bench.abort(rid) == 1
    assert aborted_rids(bench) == [rid]
    assert rid not in bench.outcomes
    if is_in_time:
        bench.say("cancelled", rid=rid)
        assert isinstance(bench.outcomes[rid], RequestCancelled)
    else:
        bench.say("finished", DONE, rid=rid)
        assert bench.outcomes[rid] == DONE


def test_an_aborted_update_ends_by_the_routers_word_however_long_that_takes(bench: Bench) -> None:
    rid = publish(bench, deadline_s=60.0)
    bench.abort(rid)
    bench.pass_time(30.0)
    assert rid not in bench.outcomes
    bench.say("finished", DONE, rid=rid)
    assert bench.outcomes[rid] == DONE


def test_a_restarted_router_is_told_of_an_aborted_update_and_of_the_abort(bench: Bench) -> None:
    rid = publish(bench)
    bench.abort(rid)
    bench.sent.clear()
    bench.welcome(epoch=2, instance="r2")
    kinds = [entry.kind for entry in bench.sent if entry.kind in {"publish_version", "abort"}]
    assert kinds[0] == "publish_version"
    assert set(aborted_rids(bench)) == {rid}


def test_an_update_that_never_left_is_cancelled_at_once(seed: int) -> None:
    bench = Bench(seed)
    rid = publish(bench)
    bench.abort(rid)
    assert isinstance(bench.outcomes[rid], RequestCancelled)


def test_to_abort_everything_that_samples_leaves_updates_alone(bench: Bench) -> None:
    rid = publish(bench)
    assert bench.abort() == 0
    assert aborted_rids(bench) == []
    bench.say("finished", DONE, rid=rid)
    assert bench.outcomes[rid] == DONE


def test_an_update_goes_on_when_nobody_waits_for_it(bench: Bench) -> None:
    rid = publish(bench)
    bench.apply(bench.core.let_go(rid, bench.clock.now()))
    assert aborted_rids(bench) == []


def test_an_aborted_update_without_an_ending_is_over_at_its_deadline(bench: Bench) -> None:
    rid = publish(bench, deadline_s=5.0)
    bench.abort(rid)
    bench.pass_time(7.0)
    outcome = bench.outcomes[rid]
    assert isinstance(outcome, DeadlineExceeded)
    assert isinstance(outcome, BusError)
    assert outcome.outcome == "unknown"


def test_a_failed_update_raises_what_the_router_says(bench: Bench) -> None:
    rid = publish(bench)
    bench.say("failed", Problem("update_failed", "w0: no", "failed"), rid=rid)
    assert isinstance(bench.outcomes[rid], BusError)
