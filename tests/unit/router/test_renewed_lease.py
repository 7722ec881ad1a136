"""A worker that is here again with its next lease has lost nothing that is detached."""

from typing import cast

from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.endings import Lost
from rolloutbus.bus.wire.messages.generation import Generate, SamplingParams
from tests.unit.router.harness import Bus, SimClient, SimWorker

_PLACE = Placement("default", group="g", cost=10, outlives_client=True)
_BODY = pack(Generate(bytes(4), SamplingParams(max_new_tokens=8)))


def _running(bus: Bus) -> tuple[SimWorker, SimClient, Entry]:
    """A worker that runs a detached request and another one."""
    worker, client = bus.worker(), bus.client()
    client.generate(deadline_s=60)
    client.say(Entry("generate", client.next_rid(), deadline_ms=60_000, place=_PLACE, body=_BODY))
    commands = worker.take("generate")
    worker.accept(*commands)
    client.heard.clear()
    return worker, client, commands[1]


def _renew(worker: SimWorker, *, running: list[Entry]) -> None:
    """Its lease has expired there, and not yet here."""
    worker.lease_no += 1
    worker.running = [(each.rid, each.attempt, each.route) for each in running]
    worker.detached = [(each.rid, "g") for each in running]
    worker.connect()
    worker.hello()
    worker.heartbeat()


def _lost(client: SimClient) -> list[str]:
    told = [cast("Lost", unpack(entry)) for entry in client.take("lost")]
    return [rid for each in told for rid, _ in each.items]


def test_only_what_needs_its_client_is_lost() -> None:
    bus = Bus()
    worker, client, detached = _running(bus)
    _renew(worker, running=[detached])
    assert detached.rid not in _lost(client)
    worker.end(detached)
    assert [each.rid for each in client.take("finished")] == [detached.rid]


def test_what_goes_on_fills_a_slot_of_the_new_lease() -> None:
    bus = Bus()
    worker, _, detached = _running(bus)
    _renew(worker, running=[detached])
    record = bus.core.context.members.named(worker.name)
    assert record is not None
    assert (record.requests, record.outstanding_cost) == ({detached.rid}, _PLACE.cost)


def test_what_the_first_heartbeat_does_not_name_is_lost_after_all() -> None:
    bus = Bus()
    worker, client, detached = _running(bus)
    _renew(worker, running=[])
    assert detached.rid in _lost(client)


def test_newer_process_of_its_name_has_nothing_of_it() -> None:
    bus = Bus()
    worker, client, detached = _running(bus)
    worker.boot = "e" * 32
    _renew(worker, running=[])
    assert detached.rid in _lost(client)
