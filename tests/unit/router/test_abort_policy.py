"""A trainer stops what all clients sample for a policy."""

from rolloutbus.bus.wire.codec import unpack, unpack_result
from rolloutbus.bus.wire.messages.generation import Abort, Aborted, AbortPolicy, PolicyAborted
from tests.unit.router.harness import Bus


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
