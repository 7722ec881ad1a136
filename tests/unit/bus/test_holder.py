"""A lease runs from the sending of a heartbeat, and binds to ever newer routers."""

from rolloutbus.bus.membership.lease import REMEMBERED_BEATS, LeaseHolder


def holder() -> LeaseHolder:
    made = LeaseHolder("boot", 2.4)
    made.renounce()
    return made


def test_lease_runs_from_the_sending() -> None:
    lease = holder()
    seq = lease.next_heartbeat(10.0)
    assert lease.renew(seq)
    assert lease.is_held(12.39)
    assert not lease.is_held(12.4)


def test_answer_to_an_older_heartbeat_does_not_shorten_the_lease() -> None:
    lease = holder()
    first, second = lease.next_heartbeat(10.0), lease.next_heartbeat(10.5)
    lease.renew(second)
    lease.renew(first)
    assert lease.is_held(12.8)


def test_renounced_lease_is_not_renewed_by_answers_to_its_heartbeats() -> None:
    lease = holder()
    seq, epoch = lease.next_heartbeat(10.0), lease.epoch
    lease.renounce()
    assert not lease.renew(seq)
    assert lease.epoch != epoch


def test_unanswered_heartbeats_are_forgotten() -> None:
    lease = holder()
    first = lease.next_heartbeat(0.0)
    for n in range(REMEMBERED_BEATS):
        lease.next_heartbeat(float(n))
    assert not lease.renew(first)


def test_another_router_is_obeyed_only_if_it_is_newer() -> None:
    lease = holder()
    assert lease.bind(2, "a")
    assert not lease.bind(2, "b")
    assert not lease.bind(1, "b")
    assert lease.bind(2, "a")
    assert lease.bind(3, "b")
    assert (lease.router_epoch, lease.instance) == (3, "b")
