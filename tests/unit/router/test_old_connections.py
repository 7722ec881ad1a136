"""What an older connection of the same process still brings changes nothing."""

from tests.unit.router.harness import Bus


def test_the_hello_of_a_lease_given_up_does_not_end_the_present_one() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    old_peer = worker.peer
    worker.lease_no = 2
    worker.connect()
    worker.hello()
    worker.heartbeat()
    client.generate()
    worker.accept(*worker.take("generate"))

    new_peer, worker.peer, worker.lease_no = worker.peer, old_peer, 1
    worker.hello()

    worker.peer, worker.lease_no = new_peer, 2
    assert client.take("lost") == []
    assert bus.counters["stale_hellos"] == 1
    client.generate()
    assert len(worker.take("generate")) == 1


def test_a_lease_that_is_over_does_not_begin_again() -> None:
    bus = Bus()
    worker = bus.worker()
    worker.is_alive = False
    bus.advance(4)

    worker.is_alive = True
    worker.connect()
    worker.hello()
    assert worker.take_body("dismissed").code == "unknown-peer"
    assert bus.core.context.members.named(worker.name) is None

    worker.lease_no += 1
    worker.hello()
    assert bus.core.context.members.named(worker.name) is not None


def test_a_client_is_not_dismissed_for_its_own_older_connection() -> None:
    bus = Bus()
    client = bus.client()
    old_peer = client.peer
    client.connect()
    client.hello()
    new_peer, client.peer = client.peer, old_peer
    client.hello()  # it lay unread in the older connection
    client.peer = new_peer

    assert client.take("dismissed") == []
    client.heartbeat()
    assert [entry.kind for entry in client.take("dismissed")] == ["dismissed"]  # say hello again
    client.hello()
    client.take("lease")
    client.heartbeat()
    assert len(client.take("lease")) == 1
