"""A trainer stops what all clients sample for a policy."""

from typing import cast

import pytest

from rolloutbus.bus.wire.codec import pack, unpack, unpack_result
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.generation import (
    Abort,
    Aborted,
    AbortPolicy,
    Attach,
    DetachedList,
    DetachedRequest,
    Generate,
    PolicyAborted,
    SamplingParams,
)
from rolloutbus.bus.wire.messages.membership import Goodbye
from tests.unit.router.harness import Bus, SimClient, SimWorker


def test_requests_of_all_clients_are_stopped_and_their_clients_are_told_first() -> None:
    bus = Bus()
    worker = bus.worker("w0", slots=1)
    trainer, actor = bus.client("trainer"), bus.client("actor")
    running = [actor.generate() for _ in range(2)]
    worker.accept(*worker.take("generate"))
    waiting = [actor.generate(), trainer.generate()]
    actor.generate(policy="judge")  # it goes on waiting
    actor.heard.clear()

    asked = trainer.ask("abort_policy", AbortPolicy("default"))

    (finished,) = trainer.take("finished")
    assert (finished.rid, unpack_result("abort_policy", finished)) == (asked, Aborted(4))
    assert [entry.kind for entry in actor.heard] == ["policy_aborted", "cancelled"]
    assert unpack(actor.heard[0]) == PolicyAborted("default")
    assert [entry.rid for entry in actor.take("cancelled")] == [waiting[0]]
    assert [entry.rid for entry in trainer.take("cancelled")] == [waiting[1]]
    assert unpack(worker.take("abort")[0]) == Abort(running)


def test_a_policy_that_nobody_serves_or_asks_for_is_refused() -> None:
    bus = Bus()
    trainer = bus.client("trainer")
    trainer.ask("abort_policy", AbortPolicy("judge"))
    assert trainer.ending() == ("finished", "")  # no worker has come yet: who knows
    bus.worker("w0")

    trainer.ask("abort_policy", AbortPolicy("defalt"))

    assert trainer.ending() == ("refused", "unknown_policy")
    bus.client("actor").generate(policy="defalt")
    trainer.ask("abort_policy", AbortPolicy("defalt"))
    assert trainer.ending() == ("finished", "")


def test_a_detached_request_that_was_stopped_is_not_queued_again() -> None:
    bus = Bus()
    worker, trainer, actor = bus.worker(), bus.client("trainer"), bus.client("actor")
    actor.generate(outlives_client=True)
    (command,) = worker.take("generate")
    worker.accept(command)

    trainer.ask("abort_policy", AbortPolicy("default"))
    worker.end(command, "cancelled")
    bus.advance(2)

    assert actor.ending() == ("cancelled", "")
    assert not worker.take("generate")


def _detached(owner: SimClient, deadline_s: float = 600) -> str:
    """Submit a detached request, with its body; returns its rid."""
    rid = owner.next_rid()
    place = Placement("default", cost=10, outlives_client=True)
    body = pack(Generate(bytes(4), SamplingParams(max_new_tokens=8)))
    owner.say(Entry("generate", rid, deadline_ms=int(deadline_s * 1000), place=place, body=body))
    return rid


def _reborn(owner: SimClient) -> None:
    """Its process is another one now, which has no request."""
    owner.connect()
    owner.is_alive = True
    owner.heard.clear()
    owner.hello("d" * 32)


@pytest.mark.parametrize("is_followed", [True, False])
@pytest.mark.parametrize("is_begun", [True, False])
def test_a_stopped_request_does_not_go_to_another_worker_when_its_own_dies(
    *, is_followed: bool, is_begun: bool
) -> None:
    bus = Bus()
    first, trainer, owner = bus.worker("w0"), bus.client("trainer"), bus.client("actor")
    rid = _detached(owner)
    (command,) = first.take("generate")
    owner.is_alive = is_followed
    if is_begun:
        first.accept(command)
    bus.advance(3)
    second = bus.worker("w1")
    trainer.ask("abort_policy", AbortPolicy("default"))

    first.is_alive = False
    bus.advance(20)

    assert second.take("generate") == []
    if is_followed:
        assert owner.ending() == ("cancelled", "")
    _reborn(owner)
    owner.ask("attach", Attach(), rid=rid)
    assert owner.ending() == ("cancelled", "")


def test_an_absent_client_finds_out_that_its_waiting_request_was_stopped() -> None:
    bus = Bus()
    worker, trainer, owner = bus.worker(slots=1), bus.client("trainer"), bus.client("actor")
    rids = [_detached(owner) for _ in range(6)]
    worker.accept(*worker.take("generate"))
    owner.is_alive = False
    bus.advance(3)
    trainer.ask("abort_policy", AbortPolicy("default"))
    _reborn(owner)

    owner.ask("attach", Attach(), rid=rids[-1])

    assert owner.ending() == ("cancelled", "")
    owner.say_over(rids[-1])
    owner.ask("attach", Attach(), rid=rids[-1])
    assert owner.ending() == ("refused", "unknown_request")


def _in_doubt(bus: Bus, owner: SimClient) -> str:
    """A detached request that was lost, and of which its client has been told so."""
    worker, rid = bus.worker("w0"), _detached(owner)
    worker.accept(*worker.take("generate"))
    worker.is_alive = False
    worker.say(Entry("goodbye", epoch=worker.epoch, body=pack(Goodbye("engine_killed"))))
    assert len(owner.take("lost")) == 1
    return rid


def test_a_request_in_doubt_is_stopped_too_and_its_client_finds_out() -> None:
    bus = Bus()
    trainer, owner = bus.client("trainer"), bus.client("actor")
    rid = _in_doubt(bus, owner)
    owner.is_alive = False
    other = bus.worker("w1")
    trainer.ask("abort_policy", AbortPolicy("judge"))
    assert trainer.ending() == ("refused", "unknown_policy")  # it is not meant

    trainer.ask("abort_policy", AbortPolicy("default"))

    assert unpack_result("abort_policy", trainer.heard_one("finished")) == Aborted(1)
    bus.advance(20)
    assert other.take("generate") == []
    assert "detached_requeued" not in bus.counters
    _reborn(owner)
    owner.ask("list_detached")
    listed = cast("DetachedList", unpack_result("list_detached", owner.heard_one("finished")))
    assert listed.requests == [DetachedRequest(rid, "ended")]
    owner.ask("attach", Attach(), rid=rid)
    assert owner.ending() == ("cancelled", "")


def test_a_request_that_an_abort_names_twice_is_counted_once() -> None:
    client = Bus().client()
    rid = client.generate()
    client.ask("abort", Abort([rid, rid]))
    assert unpack_result("abort", client.heard_one("finished")) == Aborted(1)


@pytest.mark.parametrize("everything", [True, False])
def test_its_client_can_stop_what_is_in_doubt(*, everything: bool) -> None:
    bus = Bus()
    owner = bus.client("actor")
    rid = _in_doubt(bus, owner)
    other, stranger = bus.worker("w1"), bus.client("stranger")
    stranger.ask("abort", Abort([rid]))
    assert unpack_result("abort", stranger.heard_one("finished")) == Aborted(0)

    owner.ask("abort", Abort([] if everything else [rid], everything=everything))

    assert unpack_result("abort", owner.heard_one("finished")) == Aborted(1)
    assert owner.ending() == ("cancelled", "")
    bus.advance(20)
    assert other.take("generate") == []


def _runs_for_absent_owner(bus: Bus) -> tuple[SimWorker, SimClient, Entry]:
    """A detached request at a worker, and its client, which has died."""
    worker, owner = bus.worker("w0"), bus.client("actor")
    _detached(owner)
    (command,) = worker.take("generate")
    worker.accept(command)
    worker.detached = [(command.rid, "")]
    owner.is_alive = False
    return worker, owner, command


@pytest.mark.parametrize("has_ended", [True, False])
@pytest.mark.parametrize("silent_s", [2, 6])
def test_a_worker_that_was_cut_off_then_is_stopped_when_it_is_back(
    *, silent_s: int, has_ended: bool
) -> None:
    bus = Bus()
    worker, owner, command = _runs_for_absent_owner(bus)
    worker.is_alive = False
    bus.advance(silent_s)
    bus.client("trainer").ask("abort_policy", AbortPolicy("default"))
    bus.advance(6)

    if has_ended:
        worker.outbox, worker.running = worker.running, []
    worker.lease_no += 1
    worker.connect()
    worker.hello()
    worker.heartbeat()

    assert worker.take_body("fenced").items == [(command.rid, command.attempt)]
    _reborn(owner)
    owner.ask("attach", Attach(), rid=command.rid)
    assert owner.ending() == ("cancelled", "")


def test_a_worker_that_did_not_hear_the_abort_hears_it_again_though_the_client_is_absent() -> None:
    bus = Bus()
    worker, owner, command = _runs_for_absent_owner(bus)
    bus.client("trainer").ask("abort_policy", AbortPolicy("default"))
    assert len(worker.take("abort")) == 1  # it is lost with the connection
    worker.connect()
    worker.hello()
    worker.heartbeat()

    assert worker.take_body("abort") == Abort([command.rid])

    worker.outbox = [(command.rid, command.attempt, "actor")]
    worker.end(command, "cancelled")
    bus.advance(2)
    assert worker.take("abort") == []
    _reborn(owner)
    owner.ask("attach", Attach(), rid=command.rid)
    worker.end(command, "cancelled")
    assert owner.ending() == ("cancelled", "")


def test_a_recovering_router_answers_when_it_knows_what_runs() -> None:
    bus = Bus(recovered=False)
    trainer = bus.client("trainer")
    asked = trainer.ask("abort_policy", AbortPolicy("default"))
    worker = bus.worker("w0")
    worker.running, worker.detached = [("actor/1", (1, 7), "actor")], [("actor/1", "")]
    bus.advance(4)
    assert trainer.take("finished", "policy_aborted") == []

    trainer.ask("abort_policy", AbortPolicy("default"), rid=asked)

    assert unpack_result("abort_policy", trainer.heard_one("finished")) == Aborted(1)
    assert worker.take_body("abort") == Abort(["actor/1"])
