"""One key among others gets its share of a busy fleet, whatever its clients say of themselves."""

from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from rolloutbus.bus.security.principals import Principal
from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Generate, SamplingParams
from rolloutbus.bus.wire.messages.membership import ClientHeartbeat, Hello
from rolloutbus.bus.wire.validation import check_cost, cost_of
from rolloutbus.router.events import Received, Ticked
from rolloutbus.router.requests.lane import MIN_ENDED
from tests.unit.router.harness import Bus, SimPeer, SimWorker

BODY = Generate(bytes(4 * 20), SamplingParams(max_new_tokens=80))
COST = cost_of(BODY)
S_PER_TOKEN = 0.002
SLOTS = 4
STEP_S = 0.05
Place = Callable[[Placement], Placement]


class Job(SimPeer):
    """A client process: its connection has a key, and it keeps so many requests open."""

    def __init__(self, bus: Bus, principal: Principal, name: str, window: int) -> None:
        super().__init__(bus, name)
        self.principal, self.window = principal, window
        self.n_asked = self.n_done = self.n_open = 0
        self.place = Placement("default", cost=COST)
        self.say(Entry("hello", body=pack(Hello("client", name, "c" * 32))))

    def say(self, *entries: Entry) -> None:
        self.bus.reachable.add(self.peer)
        core, now = self.bus.core, self.bus.now
        self.bus.apply(core.handle(Received(self.peer, list(entries), self.principal), now))

    def heartbeat(self) -> None:
        self.say(Entry("client_beat", body=pack(_heartbeats(self.bus.now))))

    def fill(self) -> None:
        """Take what has ended, and ask for as much again."""
        ended = self.take("finished", "refused", "failed", "expired")
        self.n_done += sum(each.kind == "finished" for each in ended)
        self.n_open -= len(ended)
        entries: list[Entry] = []
        while self.n_open < self.window:
            self.n_asked += 1
            self.n_open += 1
            entries.append(self.generate(f"{self.name}/{self.n_asked}"))
        if entries:
            self.say(*entries)

    def generate(self, rid: str, deadline_s: float = 1000) -> Entry:
        """One request."""
        left_ms = int(1000 * deadline_s)
        return Entry("generate", rid, deadline_ms=left_ms, place=self.place, body=pack(BODY))


def _heartbeats(now: float) -> ClientHeartbeat:
    return ClientHeartbeat(int(now * 1000))


class Engine:
    """A worker whose requests take as long as their bodies say, at most so many at once."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.worker: SimWorker = bus.worker(slots=SLOTS)
        self._waiting: list[Entry] = []
        self._running: list[tuple[float, Entry]] = []

    def step(self) -> None:
        """Time has passed."""
        now = self._bus.now
        for each in [each for each in self._running if each[0] <= now]:
            self._running.remove(each)
            self.worker.end(each[1])
        self._waiting += self.worker.take("generate")
        while self._waiting and len(self._running) < SLOTS:
            entry = self._waiting.pop(0)
            assert entry.place is not None
            self.worker.accept(entry)
            problem = check_cost(entry.place, BODY, max_context=4096)
            if problem is not None:
                self.worker.end(entry, "refused", problem)
            else:
                self._running.append((now + COST * S_PER_TOKEN, entry))


def _rates(attackers: Sequence[str], place: Place, seconds: float = 20) -> tuple[float, float]:
    """Requests per second of a modest job: alone, and beside another key with these names."""
    found: list[float] = []
    for names in ((), attackers):
        bus = Bus(queue_limit=10_000)
        engine = Engine(bus)
        victim = Job(bus, Principal("11" * 32, "victim", "client"), "victim", 16)
        other = Principal("22" * 32, "other", "client")
        jobs = [Job(bus, other, name, 120 // len(names)) for name in names]
        for job in jobs:
            job.place = place(job.place)
        n_steps = round(seconds / STEP_S)
        for step in range(n_steps):
            for job in (*jobs, victim):
                job.fill()
            bus.now += STEP_S
            engine.step()
            if step % 10 == 0:
                engine.worker.heartbeat()
                for job in (*jobs, victim):
                    job.heartbeat()
            bus.apply(bus.core.handle(Ticked(), bus.now))
        found.append(victim.n_done / seconds)
    return found[0], found[1]


def _attacks() -> Iterator[tuple[str, list[str], dict[str, int]]]:
    yield "fair", ["other"], {}
    yield "no cost", ["other"], {"cost": 0}
    yield "too little cost", ["other"], {"cost": 1}
    yield "crashes", ["other"], {"crashes": 2}
    yield "priority", ["other"], {"priority": 100}
    yield "names", [f"other-{n}" for n in range(30)], {}


@pytest.mark.parametrize(
    ("names", "asked"), [a[1:] for a in _attacks()], ids=[a[0] for a in _attacks()]
)
def test_another_key_leaves_a_job_its_half_of_the_fleet(
    names: list[str], asked: dict[str, int]
) -> None:
    alone, beside = _rates(names, lambda place: msgspec.structs.replace(place, **asked))
    print(f"{alone:.1f} requests/s alone, {beside:.1f} beside the other key")
    assert beside >= 0.4 * alone


def test_priorities_are_a_right_with_a_range() -> None:
    bus = Bus()
    worker = bus.worker(slots=100)
    principal = Principal("11" * 32, "judge", "client", priorities=(-5, 10))
    judge = Job(bus, principal, "judge", 1)
    for number, priority in enumerate((-6, -5, 0, 10, 11)):
        judge.place = msgspec.structs.replace(judge.place, priority=priority)
        judge.say(judge.generate(f"judge/{number}"))
    assert [each.rid for each in worker.take("generate")] == ["judge/1", "judge/2", "judge/3"]
    for entry in judge.take("refused"):
        problem = unpack(entry)
        assert isinstance(problem, Problem)
        assert (problem.code, problem.field) == ("forbidden", "place.priority")
        assert "priorities -5 to 10" in problem.message


@pytest.mark.parametrize("priorities", [(1, 5), (-5, -1), (5, 0), (0, 101), (-101, 0)])
def test_ranges_hold_the_priority_of_everybody(priorities: tuple[int, int]) -> None:
    with pytest.raises(SettingsError, match="priorities"):
        Principal("11" * 32, "judge", "client", priorities=priorities)


def test_what_one_key_ran_says_nothing_of_how_long_another_one_runs() -> None:
    bus = Bus()
    worker = bus.worker(slots=1)
    slow = Job(bus, Principal("22" * 32, "slow", "client"), "slow", 1)
    slow.place = msgspec.structs.replace(slow.place, cost=1)
    for number in range(MIN_ENDED + 8):
        slow.say(slow.generate(f"slow/{number}"))
    for _ in range(MIN_ENDED + 1):  # five seconds for a token
        bus.advance(5)
        worker.end(worker.take("generate")[0])
    victim = Job(bus, Principal("11" * 32, "victim", "client"), "victim", 1)
    victim.say(victim.generate("victim/1", deadline_s=50))
    assert victim.take("refused") == []
    slow.place = msgspec.structs.replace(slow.place, cost=1000)
    slow.say(slow.generate("slow/9999", deadline_s=50))
    problem = unpack(slow.take("refused")[0])
    assert isinstance(problem, Problem)
    assert "-" not in problem.message


def test_router_counts_what_a_client_has_not_said() -> None:
    bus = Bus()
    worker, client = bus.worker(slots=1), Job(bus, Principal("11" * 32, "c", "client"), "c", 1)
    client.place = msgspec.structs.replace(client.place, cost=0)
    client.say(client.generate("c/1"))
    (told,) = worker.take("generate")
    assert told.place is not None
    assert told.place.cost == COST
    assert bus.core.context.members.workers()[0].outstanding_cost == COST


def test_a_full_queue_makes_room_between_the_names_of_one_key() -> None:
    bus = Bus(queue_limit=6)
    key, other = Principal("22" * 32, "key", "client"), Principal("11" * 32, "other", "client")
    greedy, modest = Job(bus, key, "key", 1), Job(bus, key, "key-modest", 1)
    beside = Job(bus, other, "other", 1)
    for number in range(3):
        beside.say(beside.generate(f"other/{number}"))
        greedy.say(greedy.generate(f"key/{number}"))
    modest.say(modest.generate("key-modest/1"))
    assert modest.take("refused") == []
    assert [each.rid for each in greedy.take("refused")] == ["key/2"]
    assert beside.take("refused") == []
