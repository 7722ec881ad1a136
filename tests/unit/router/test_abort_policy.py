"""A trainer stops what all clients sample for a policy."""

import pytest

from rolloutbus.bus.wire.codec import pack, unpack, unpack_result
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.generation import (
    Abort,
    Aborted,
    AbortPolicy,
    Attach,
    Generate,
    PolicyAborted,
    SamplingParams,
)
from tests.unit.router.harness import Bus, SimClient


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
