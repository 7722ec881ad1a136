"""A restarted router: soft state comes back from workers and clients."""

from collections.abc import Callable

import pytest

from rolloutbus.bus.wire.entry import NO_BODY, Entry, Placement
from rolloutbus.bus.wire.messages.generation import Abort
from rolloutbus.router.requests.admission_control import MAX_ENDINGS
from rolloutbus.router.requests.detached import MAX_DETACHED
from rolloutbus.router.requests.record import Request
from tests.unit.router.harness import Bus, SimClient


def _resend(client: SimClient) -> str:
    rid = client.next_rid()
    client.submit(rid, 60, resend=True)
    return rid


def test_new_request_is_placed_at_once() -> None:
    bus = Bus(recovered=False)
    worker, client = bus.worker(), bus.client()
    client.generate()
    assert len(worker.take("generate")) == 1


def test_new_request_does_not_wait_behind_resent_ones() -> None:
    bus = Bus(recovered=False)
    worker, client = bus.worker(), bus.client()
    _resend(client)
    rid = client.generate()
    assert [each.rid for each in worker.take("generate")] == [rid]


def test_latest_waits_for_the_store_which_knows_what_is_the_latest() -> None:
    bus = Bus(recovered=False)
    behind, client = bus.worker("w0", version=3), bus.client()
    for versions in ("latest", "max-staleness:0"):
        client.generate(versions=versions)
    assert behind.take("generate") == []
    bus.store({"default": 4})
    assert behind.take("generate") == []
    assert len(bus.worker("w1", version=4).take("generate")) == 2


def test_latest_is_what_workers_attest_if_no_store_comes_while_recovering() -> None:
    bus = Bus(recovered=False)
    worker, client = bus.worker(version=3), bus.client()
    rid = client.generate(versions="latest")
    bus.advance(3)
    assert worker.take("generate") == []
    bus.advance(1)
    assert [each.rid for each in worker.take("generate")] == [rid]


def test_who_takes_any_weights_waits_for_no_store() -> None:
    bus = Bus(recovered=False)
    worker, client = bus.worker(version=3), bus.client()
    client.generate(versions="any")
    client.generate(versions="min:2")
    assert len(worker.take("generate")) == 2


def test_resent_request_waits_until_workers_could_claim_it() -> None:
    bus = Bus(recovered=False)
    worker, client = bus.worker(), bus.client()
    rid = _resend(client)
    bus.advance(3)
    assert worker.take("generate") == []
    bus.advance(1)
    assert [each.rid for each in worker.take("generate")] == [rid]


def test_resent_request_is_placed_at_once_after_recovery() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    _resend(client)
    assert len(worker.take("generate")) == 1


def test_running_request_is_adopted_by_its_workers_heartbeat() -> None:
    bus = Bus(recovered=False)
    worker, client = bus.worker(), bus.client()
    rid = _resend(client)
    worker.running = [(rid, (1, 5), "trainer")]
    worker.heartbeat()
    bus.advance(5)
    assert worker.take("generate", "fenced") == []
    assert bus.counters["adopted"] == 1


def test_client_that_was_told_to_wait_is_told_that_its_request_runs_after_all() -> None:
    bus = Bus(recovered=False)
    worker, client = bus.worker(), bus.client()
    rid = _resend(client)
    bus.advance(0.25)
    assert client.take_body("queued").rids == [rid]

    worker.running = [(rid, (1, 5), "trainer")]
    worker.heartbeat()

    assert client.take_body("accepted").items == [(rid, (1, 5))]


def test_running_request_is_adopted_before_its_client_comes_back() -> None:
    bus = Bus(recovered=False)
    worker = bus.worker()
    worker.running = [("trainer/1", (1, 5), "trainer")]
    worker.heartbeat()
    client = bus.client()
    client.submit("trainer/1", 60, resend=True)
    bus.advance(5)
    assert len(client.take("accepted")) == 1
    assert worker.take("generate") == []


def test_ending_of_a_parked_request_is_forwarded_and_it_does_not_run_again() -> None:
    bus = Bus(recovered=False)
    worker, client = bus.worker(), bus.client()
    rid = _resend(client)
    worker.end(Entry("generate", rid, (1, 5), route="trainer"))
    assert [each.rid for each in client.take("finished")] == [rid]
    bus.advance(5)
    assert worker.take("generate") == []


def test_a_request_whose_ending_crossed_its_copy_on_the_way_does_not_run_again() -> None:
    bus = Bus(recovered=False)
    worker, client = bus.worker(), bus.client()
    rid = client.next_rid()
    worker.say(Entry("finished", rid, (1, 7), worker.epoch, client.name))
    ending = client.heard_one("finished")
    client.submit(rid, 60, resend=True)  # it had left before the ending came
    client.acknowledge(ending)
    bus.advance(4)
    assert worker.take("generate") == []


def test_who_wants_it_in_spite_of_an_old_ending_sends_it_once_more() -> None:
    bus = Bus(recovered=False)
    worker, client = bus.worker(), bus.client()
    rid = client.next_rid()
    worker.say(Entry("finished", rid, (1, 7), worker.epoch, client.name))
    client.submit(rid, 60, resend=True)
    client.acknowledge(client.heard_one("finished"))
    client.submit(rid, 60, resend=True)
    bus.advance(4)
    assert [each.rid for each in worker.take("generate")] == [rid]


def test_parked_request_that_was_aborted_ends_when_no_worker_has_claimed_it() -> None:
    bus = Bus(recovered=False)
    worker, client = bus.worker(), bus.client()
    rid = _resend(client)
    client.ask("abort", Abort([rid]))
    assert client.take("cancelled") == []
    bus.advance(4)
    assert [each.rid for each in client.take("cancelled")] == [rid]
    assert worker.take("generate") == []


def test_parked_request_that_was_aborted_is_stopped_at_the_worker_that_claims_it() -> None:
    bus = Bus(recovered=False)
    worker, client = bus.worker(), bus.client()
    rid = _resend(client)
    client.ask("abort", Abort([rid]))
    worker.running = [(rid, (1, 5), "trainer")]
    worker.heartbeat()
    assert worker.take_body("abort") == Abort([rid])
    worker.end(Entry("generate", rid, (1, 5), route="trainer"), "cancelled")
    bus.advance(4)
    assert [(each.rid, each.route) for each in client.take("cancelled")] == [(rid, "w0")]


def test_parked_request_expires_at_its_deadline() -> None:
    bus = Bus(recovered=False)
    bus.worker()
    client = bus.client()
    client.submit(client.next_rid(), 1, resend=True)
    bus.advance(2)
    problem = client.problem()
    assert (problem.code, problem.outcome) == ("deadline", "unknown")  # a worker may have it


@pytest.mark.parametrize("deadline_s", [1, 60])
def test_parked_request_is_not_refused_by_a_router_that_cannot_know_whether_it_runs(
    deadline_s: int,
) -> None:
    bus = Bus(recovered=False)
    bus.worker(version=5)
    bus.store({"default": 5})
    client = bus.client()
    client.submit(client.next_rid(), deadline_s, resend=True, versions="exact:4")
    bus.advance(2)
    kinds = [each.kind for each in client.take("refused", "expired")]
    assert kinds == (["expired"] if deadline_s == 1 else [])


def _fill_queue(bus: Bus) -> None:
    bus.client("other").generate(policy="other", deadline_s=60)


def _fill_detached(bus: Bus) -> None:
    place = Placement("default", outlives_client=True)
    for number in range(MAX_DETACHED):
        request = Request(f"c/{number}", "c", "c", place, "queued", None, NO_BODY)
        bus.core.context.detached.add(request)


def _fill_backlog(bus: Bus) -> None:
    worker = bus.worker("w1")
    worker.outbox = [(f"trainer/{n + 100}", (1, n + 100), "trainer") for n in range(MAX_ENDINGS)]
    bus.advance(0.5)


@pytest.mark.parametrize("fill", [_fill_queue, _fill_detached, _fill_backlog])
def test_resent_request_that_finds_no_room_is_not_refused_while_a_worker_may_run_it(
    fill: Callable[[Bus], None],
) -> None:
    bus = Bus(recovered=False, queue_limit=1)
    worker, client = bus.worker(), bus.client()
    fill(bus)
    rid = client.next_rid()
    again = {"resend": True, "outlives_client": fill is _fill_detached}

    client.submit(rid, 60, **again)
    assert client.take("refused") == []

    worker.running = [(rid, (1, 5), "trainer")]
    worker.heartbeat()
    assert client.take_body("accepted").items == [(rid, (1, 5))]
    client.submit(rid, 60, **again)
    assert len(client.take("accepted")) == 1
    worker.end(Entry("generate", rid, (1, 5), route="trainer"))
    assert client.ending() == ("finished", "")


@pytest.mark.parametrize("fill", [_fill_queue, _fill_backlog])
def test_resent_request_that_nobody_claimed_is_refused_when_there_is_no_room(
    fill: Callable[[Bus], None],
) -> None:
    assert _sent_twice(fill, outlives_client=False).ending() == ("refused", "busy")


@pytest.mark.parametrize("fill", [_fill_queue, _fill_detached, _fill_backlog])
def test_resent_detached_request_is_not_refused_for_a_worker_may_be_cut_off_with_it(
    fill: Callable[[Bus], None],
) -> None:
    assert _sent_twice(fill, outlives_client=True).take("refused", "expired") == []


def _sent_twice(fill: Callable[[Bus], None], *, outlives_client: bool) -> SimClient:
    """Who sends a request again, that no worker claims: while the router recovers, and later."""
    bus = Bus(recovered=False, queue_limit=1)
    client = bus.client()
    fill(bus)
    rid = client.next_rid()
    for _ in range(2):
        assert client.take("refused") == []
        client.submit(rid, 60, resend=True, outlives_client=outlives_client)
        bus.advance(4)
    return client


def test_router_raises_its_epoch_above_the_one_its_members_obeyed() -> None:
    bus = Bus(recovered=False)
    worker = bus.worker()
    worker.hello(router_epoch=4, router_instance="router-before")
    assert bus.core.status(bus.now).router_epoch == 5


def test_without_a_store_the_attested_version_counts_as_committed() -> None:
    bus = Bus(recovered=False)
    bus.worker(version=6)
    assert bus.core.status(bus.now).committed == {"default": 6}
