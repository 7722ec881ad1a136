"""Who may get requests, and why the others may not: whoever may, gets what waits."""

import random
from pathlib import Path

import pytest

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.control import Pause, Resume
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Generate, SamplingParams
from rolloutbus.bus.wire.messages.weights import Settled
from rolloutbus.bus.wire.versions import VersionRule
from rolloutbus.router.events import Returned
from rolloutbus.router.members.eligibility import Eligibility
from rolloutbus.router.members.records import MemberRecord, Reason
from tests.unit.router.harness import Bus, SimWorker
from tests.unit.router.update_steps import prepare, publish

_DETACHED = Placement("default", cost=10, outlives_client=True)
_BODY = pack(Generate(bytes(4), SamplingParams(max_new_tokens=8)))
_NOT_READY = Problem("not_ready", "asleep", "not_started")
_CRASHED = Problem("engine_failed", "the engine died", "failed")


def _blocked(bus: Bus, name: str = "w0") -> list[str]:
    """Words of the reasons that `status` shows for a worker."""
    workers = {each.name: each for each in bus.core.status(bus.now).workers}
    return list(workers[name].blocked_by)


def test_status_tells_each_reason_in_a_word_and_a_sentence() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    assert _blocked(bus) == []
    worker.state = "asleep"
    worker.heartbeat()
    client.ask("pause", Pause("in_place"), "fleet")
    [row] = bus.core.status(bus.now).workers
    assert row.blocked_by == {
        "not_ready": Reason.NOT_READY.sentence,
        "paused": Reason.PAUSED.sentence,
    }
    assert row.state == "asleep"
    worker.state = "ready"
    worker.heartbeat()
    client.ask("resume", Resume(), "fleet")
    assert _blocked(bus) == []


def test_a_worker_that_has_only_said_hello_is_joining() -> None:
    bus = Bus()
    worker = bus.worker()
    worker.lease_no += 1
    worker.hello()
    assert _blocked(bus) == ["joining"]


def test_a_worker_that_cannot_be_sent_to_shows_it_and_its_next_heartbeat_clears_it() -> None:
    bus = Bus()
    worker = bus.worker()
    bus.apply(bus.core.handle(Returned(worker.peer, []), bus.now))
    assert _blocked(bus) == ["cut_off"]
    worker.heartbeat()
    assert _blocked(bus) == []


def test_a_commit_that_the_store_tells_of_late_blocks_who_lacks_it_at_once() -> None:
    bus = Bus()
    store, worker, client = bus.store(), bus.worker(), bus.client()
    publish(client)
    prepare(worker)
    store.heard_one("record_commit")
    store.is_alive = False
    bus.advance(31)
    store = bus.store()
    bus.advance(0.5)
    store.end(store.heard_one("settle_version"), body=Settled(is_committed=True))
    assert _blocked(bus) == ["behind"]
    client.generate()
    assert worker.take("generate") == []


def test_a_detached_request_that_comes_back_is_placed_at_once_whatever_else_waits() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.generate(versions="min:9", deadline_s=1000)  # the present workers were tried for it
    rid = client.next_rid()
    client.say(Entry("generate", rid, deadline_ms=1_000_000, place=_DETACHED, body=_BODY))
    command = worker.heard_one("generate")
    client.is_alive = False
    bus.advance(40)
    bus.client("other").generate(versions="min:9", deadline_s=1000)
    worker.take("generate")
    worker.end(command, "refused", _NOT_READY)
    assert [each.rid for each in worker.take("generate")] == [rid]


class _Steps:
    """Random events that block and unblock workers, fill them and empty them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.bus = Bus(seed=rng.randrange(1 << 30), queue_limit=1000)
        self.client = self.bus.client()
        self.workers: list[SimWorker] = []
        self.begun: list[tuple[SimWorker, Entry]] = []
        self.log: list[str] = []

    def step(self) -> None:
        kinds = {
            "joins": 1 if len(self.workers) < 4 else 0,
            "asks": 8,
            "ends": 6,
            "heartbeats": 4,
            "is_lost": 1,
            "cannot_be_sent_to": 1,
            "pauses": 1,
            "resumes": 2,
            "is_blocked": 3,
            "is_unblocked": 4,
            "time_passes": 3,
        }
        [kind] = self.rng.choices(list(kinds), list(kinds.values()))
        self.log.append(kind)
        if kind in {"joins", "asks", "pauses", "resumes", "time_passes"} or self.workers:
            getattr(self, kind)()

    def joins(self) -> None:
        name = f"w{len(self.log)}"
        self.workers.append(self.bus.worker(name, slots=2, version=self.rng.randrange(3)))

    def asks(self) -> None:
        versions = self.rng.choice(["any", "any", "latest", "min:1", "min:2"])
        session = self.rng.choice(["", "", "chat", "talk"])
        self.client.generate(versions, 1000, session=session, priority=self.rng.randrange(3))

    def ends(self) -> None:
        for worker in self.workers:
            self.begun += [(worker, entry) for entry in worker.take("generate")]
        if not self.begun:
            return
        worker, command = self.begun.pop(self.rng.randrange(len(self.begun)))
        if worker in self.workers:
            worker.accept(command)
            if self.rng.random() < 0.2:
                worker.end(command, "failed", _CRASHED)
            else:
                worker.end(command)

    def heartbeats(self) -> None:
        worker = self.rng.choice(self.workers)
        worker.state = self.rng.choice(["ready", "ready", "updating", "asleep", "draining"])
        worker.version += self.rng.random() < 0.2
        worker.heartbeat()

    def is_lost(self) -> None:
        worker = self.workers.pop(self.rng.randrange(len(self.workers)))
        worker.is_alive = False
        self.bus.advance(4)

    def cannot_be_sent_to(self) -> None:
        worker = self.rng.choice(self.workers)
        returned = worker.take("generate")
        self.bus.apply(self.bus.core.handle(Returned(worker.peer, returned), self.bus.now))

    def pauses(self) -> None:
        self.client.ask("pause", Pause("in_place"), self._route())

    def resumes(self) -> None:
        self.client.ask("resume", Resume(), self._route())

    def is_blocked(self) -> None:
        record = self.bus.core.context.members.named(self.rng.choice(self.workers).name)
        if record is not None:
            self.bus.core.context.eligibility.block(record, self.rng.choice(list(Reason)))

    def is_unblocked(self) -> None:
        record = self.bus.core.context.members.named(self.rng.choice(self.workers).name)
        if record is not None and record.blocked_by:
            reason = self.rng.choice(sorted(record.blocked_by))
            self.bus.core.context.eligibility.unblock(record, reason)

    def time_passes(self) -> None:
        self.bus.advance(self.rng.choice([0.25, 1, 3]))

    def _route(self) -> str:
        names = [f"worker:{each.name}" for each in self.workers]
        return self.rng.choice(["fleet", *names])

    def kept_out(self) -> list[str]:
        """Names of the live workers that have a reason."""
        workers = self.bus.core.context.members.workers()
        return sorted(w.name for w in workers if w.blocked_by and Reason.GONE not in w.blocked_by)

    def blocked(self) -> list[MemberRecord]:
        """The router's own table of them."""
        blocked = self.bus.core.context.eligibility.blocked()
        return sorted(blocked, key=lambda each: each.name)

    def stuck(self) -> list[str]:
        """Requests that wait though a worker could take them."""
        context = self.bus.core.context
        roomy = [
            each
            for each in context.members.workers()
            if not each.blocked_by and len(each.requests) < each.capacity
        ]
        committed = context.committed_of("default")
        return [
            f"{request.rid} waits, and {worker.name} has room"
            for request in self.bus.core.table.waiting
            for worker in roomy
            if request.rule is None or request.rule.accepts(worker.version, committed)
        ]


def test_nothing_waits_while_a_worker_that_may_serve_it_has_room(rng: random.Random) -> None:
    """Whatever blocks and unblocks workers, in whatever order."""
    for _ in range(12):
        steps = _Steps(rng)
        for _ in range(120):
            steps.step()
            steps.bus.advance(0.25)
            assert steps.stuck() == [], steps.log
            assert steps.kept_out() == [each.name for each in steps.blocked()], steps.log


def test_only_what_blocks_a_worker_keeps_it_from_the_tables(rng: random.Random) -> None:
    """Reasons come and go by themselves: one that is left keeps the worker out."""
    bus = Bus()
    bus.worker()
    [record] = bus.core.context.members.workers()
    eligibility = bus.core.context.eligibility
    for _ in range(300):
        reason = rng.choice(list(Reason))
        change = rng.choice([eligibility.block, eligibility.unblock])
        change(record, reason)
        assert (eligibility.workers("default") == []) == bool(record.blocked_by)
        assert (record.free_index >= 0) == (not record.blocked_by)


def _free(eligibility: Eligibility) -> dict[tuple[bool, int], set[str]]:
    """(with a free slot, version) -> workers with a free place."""
    free = eligibility.free.get("default")
    if free is None:
        return {}
    return {
        (has_slot, version): {each.name for each in workers}
        for has_slot, found in ((True, free.slots), (False, free.queues))
        for version, workers in found.by_version.items()
    }


@pytest.mark.parametrize("seed", range(6))
def test_what_is_kept_by_slot_and_version_is_what_a_look_at_all_workers_finds(seed: int) -> None:
    rng = random.Random(seed)
    bus = Bus(seed=seed)
    workers, client = [bus.worker(f"w{n}", slots=1) for n in range(6)], bus.client()
    context = bus.core.context
    rules = [None, VersionRule("min", 1), VersionRule("min", 3), VersionRule("exact", 2)]
    for _ in range(200):
        worker = rng.choice(workers)
        record = context.members.named(worker.name)
        assert record is not None
        match rng.choice(["version", "blocks", "unblocks", "asks", "ends"]):
            case "version":
                worker.version = rng.randrange(4)
                worker.heartbeat()
            case "blocks":
                context.eligibility.block(record, Reason.TRIPPED)
            case "unblocks":
                context.eligibility.unblock(record, Reason.TRIPPED)
            case "asks":
                client.generate(versions=rng.choice(["any", "min:1", "exact:2"]))
            case _:
                for command in worker.take("generate"):
                    worker.end(command, "failed", _NOT_READY)
        fit = [each for each in context.members.workers("default") if not each.blocked_by]
        roomy: dict[tuple[bool, int], set[str]] = {}
        for each in fit:
            if len(each.requests) < each.capacity:
                place = len(each.requests) < each.slots, each.version
                roomy.setdefault(place, set()).add(each.name)
        assert _free(context.eligibility) == roomy
        for rule in rules:
            is_served = any(rule is None or rule.accepts(each.version, 0) for each in fit)
            assert context.eligibility.can_serve("default", rule, 0) == is_served


def test_each_reason_has_a_sentence_of_its_own() -> None:
    assert len({reason.sentence for reason in Reason}) == len(Reason)
    assert all(reason.sentence.endswith(".") for reason in Reason)
    page = (Path(__file__).parents[3] / "docs/protocol.md").read_text()
    assert all(f"| `{reason.value}` | " in page for reason in Reason)
