"""A detached request that has ended for its caller has ended, whoever still runs or keeps it."""

from typing import cast

from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.endings import Fenced
from rolloutbus.bus.wire.messages.generation import Generate, SamplingParams
from tests.unit.router.harness import Bus, SimClient, SimWorker

_PLACE = Placement("default", group="g", cost=10, outlives_client=True)
_BODY = pack(Generate(bytes(4), SamplingParams(max_new_tokens=8)))
RID = "trainer/1"
OLD = (1, 7)
"""An attempt under an earlier router."""


def _submit(client: SimClient) -> None:
    client.say(Entry("generate", RID, deadline_ms=60_000, place=_PLACE, body=_BODY))


def _back_with(worker: SimWorker, *, has_ended: bool = False) -> None:
    """A worker that was cut off names the request."""
    (worker.outbox if has_ended else worker.running).append((RID, OLD, "trainer"))
    worker.detached = [(RID, "g")]
    worker.heartbeat()


def _fenced(worker: SimWorker) -> list[tuple[str, tuple[int, int]]]:
    fenced = [cast("Fenced", unpack(entry)) for entry in worker.take("fenced")]
    return [item for each in fenced for item in each.items]


def test_worker_that_comes_back_with_what_is_over_is_stopped() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker()
    client.say_over(RID)
    _back_with(worker)
    assert _fenced(worker) == [(RID, OLD)]
    assert RID not in bus.core.context.detached.requests


def test_ending_that_a_worker_kept_of_what_is_over_is_dropped_and_told_to_nobody() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker()
    client.say_over(RID)
    _back_with(worker, has_ended=True)
    worker.say(Entry("finished", RID, OLD, worker.epoch, "trainer"))
    assert _fenced(worker) == [(RID, OLD)] * 2
    assert client.take("finished") == []


def test_what_a_worker_was_found_with_is_stopped_when_its_client_says_that_it_is_over() -> None:
    bus = Bus(recovered=False)
    worker = bus.worker()
    _back_with(worker)
    client = bus.client()
    client.say_over(RID)
    assert _fenced(worker) == [(RID, OLD)]
    assert RID not in bus.core.context.detached.requests


def test_other_workers_tell_what_is_over_when_its_client_is_dead() -> None:
    bus = Bus(recovered=False)
    late = bus.worker("w0")
    _back_with(late)
    witness = bus.worker("w1")
    witness.over = [RID]
    witness.heartbeat()
    assert _fenced(late) == [(RID, OLD)]


def test_late_copy_of_a_request_that_is_over_is_not_run() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker()
    _submit(client)
    command = worker.heard_one("generate")
    worker.end(command)
    client.acknowledge(client.heard_one("finished"), RID)
    _submit(client)
    assert worker.take("generate") == []
    assert bus.counters["late_copies"] == 1


def test_request_that_was_refused_for_now_may_be_sent_again() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker()
    _submit(client)
    worker.end(worker.heard_one("generate"))
    client.acknowledge(client.heard_one("finished"))
    _submit(client)
    assert [each.rid for each in worker.take("generate")] == [RID]


def test_nobody_ends_the_requests_of_others() -> None:
    bus = Bus()
    client, thief = bus.client(), bus.client("thief")
    _submit(client)
    thief.say_over(RID)
    assert RID in bus.core.context.detached.requests
    assert bus.counters["malformed"] == 1
