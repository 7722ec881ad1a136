"""A client that does not acknowledge its endings: it alone is refused; heartbeats stay small."""

from rolloutbus.bus.membership.deliveries import Deliveries
from rolloutbus.bus.membership.outbox import MAX_NEWS
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import NO_BODY, Entry, RequestId
from rolloutbus.bus.wire.messages.membership import Heartbeat, Lease
from rolloutbus.router.requests.admission_control import MAX_BYTES, MAX_ENDINGS
from tests.unit.router.harness import Bus, SimWorker


class Teller:
    """A worker whose heartbeats are made of real deliveries."""

    def __init__(self, bus: Bus) -> None:
        self.worker: SimWorker = bus.worker(slots=100)
        self.deliveries = Deliveries(LeaseSettings())
        self.sizes: list[int] = []
        self._told = 0

    def end(self, client: str, count: int, first: int = 0) -> None:
        """So many endings wait for a client."""
        for n in range(first, first + count):
            entry = Entry("finished", f"{client}/{n}", (1, n + 1), route=client, body=NO_BODY)
            self.deliveries.outbox.put("generate", entry, 0.0)

    def heartbeat(self, *, is_lost: bool = False) -> Lease | None:
        """Tell what has changed; the answer."""
        worker, outbox = self.worker, self.deliveries.outbox
        worker.seq += 1
        news = outbox.take_news()
        heartbeat = Heartbeat(
            worker.seq,
            outbox=news.came,
            acked=news.went,
            follows=0 if news.is_whole else self._told,
            n_outbox=len(outbox),
            backlog=outbox.backlog(),
        )
        self._told = worker.seq
        body = pack(heartbeat)
        self.sizes.append(len(body))
        if is_lost:
            return None
        worker.take("lease")
        worker.say(Entry("beat", epoch=worker.epoch, body=body))
        lease = worker.take_body("lease")
        if lease.is_behind:
            outbox.report_all()
        return lease


def test_who_does_not_acknowledge_is_refused_until_he_does_and_nobody_else() -> None:
    bus = Bus()
    teller = Teller(bus)
    teller.worker.is_alive = False
    silent, other = bus.client("silent"), bus.client("other")
    teller.end("silent", MAX_ENDINGS)
    for _ in range(3):
        teller.heartbeat()
        bus.advance(0.5)
    silent.generate(deadline_s=100)
    problem = silent.problem()
    assert problem.code == "busy"
    assert f"did not acknowledge {MAX_ENDINGS} endings" in problem.message
    assert problem.retry_after_ms > 0
    taken = other.generate(deadline_s=100)
    assert [each.rid for each in teller.worker.take("generate")] == [taken]
    teller.deliveries.outbox.drop([("silent/0", (1, 1))])
    teller.heartbeat()
    bus.advance(0.25)
    taken = silent.generate(deadline_s=100)
    assert [each.rid for each in teller.worker.take("generate")] == [taken]


def test_few_large_endings_count_too() -> None:
    bus = Bus()
    worker, silent = bus.worker(), bus.client("silent")
    worker.is_alive = False
    worker.seq += 1
    heartbeat = Heartbeat(worker.seq, backlog=[("silent", 3, MAX_BYTES)])
    worker.say(Entry("beat", epoch=worker.epoch, body=pack(heartbeat)))
    bus.advance(0.25)
    silent.generate()
    assert silent.problem().code == "busy"


def test_heartbeats_of_a_worker_whose_endings_wait_tell_what_has_changed() -> None:
    bus = Bus()
    teller = Teller(bus)
    teller.worker.is_alive = False
    teller.end("silent", 156_000)
    for _ in range(156_000 // MAX_NEWS + 2):
        teller.heartbeat()
    assert max(teller.sizes) < 300_000
    assert teller.sizes[-1] < 200
    record = bus.core.context.members.workers()[0]
    assert len(record.outbox) == 156_000
    assert record.has_whole_outbox


def test_a_router_that_missed_a_heartbeat_has_all_told_again_and_believes_nothing_lost() -> None:
    bus = Bus()
    teller = Teller(bus)
    teller.worker.is_alive = False
    teller.heartbeat()
    client = bus.client()
    rid = client.generate(deadline_s=100)
    (command,) = teller.worker.take("generate")
    teller.worker.accept(command)
    ended = Entry("finished", rid, command.attempt, route="trainer")
    teller.deliveries.outbox.put("generate", ended, 0.0)
    teller.heartbeat(is_lost=True)
    lease = (
        teller.heartbeat()
    )  # it runs no more, and that it waits was said in the heartbeat before
    assert lease is not None
    assert lease.is_behind
    assert client.take("lost") == []
    lease = teller.heartbeat()
    assert lease is not None
    assert not lease.is_behind
    assert client.take("lost") == []
    record = bus.core.context.members.workers()[0]
    assert set(record.outbox) == {(RequestId(rid), command.attempt)}
    teller.deliveries.outbox.drop([(rid, command.attempt)])
    teller.heartbeat()
    assert len(client.take("lost")) == 1


def test_members_that_tell_everything_each_time_are_understood() -> None:
    bus = Bus()
    worker = bus.worker()
    worker.outbox = [("trainer/1", (1, 1), "trainer")]
    worker.heartbeat()
    record = bus.core.context.members.workers()[0]
    assert len(record.outbox) == 1
    worker.outbox = []
    worker.heartbeat()
    assert (len(record.outbox), record.has_whole_outbox) == (0, True)
