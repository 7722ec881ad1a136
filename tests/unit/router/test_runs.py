"""Whether the router takes requests and results in runs or one by one makes no difference.

One of three routers that hear the same takes runs. One takes all entry by entry, the ordinary ones
in a few steps. At the third nothing is ordinary: each entry goes through all steps.
"""

# pyright: reportPrivateUsage=false

from random import Random
from typing import Any, Literal, get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import NO_ATTEMPT, NO_BODY, Entry, Placement
from rolloutbus.bus.wire.messages.endings import Ack, Problem
from rolloutbus.bus.wire.messages.generation import Abort, OpenSession
from rolloutbus.bus.wire.messages.membership import Goodbye
from rolloutbus.bus.wire.versions import VersionRule
from rolloutbus.router.health.health import Health
from rolloutbus.router.placement.placement import Rest
from rolloutbus.router.requests.record import Request
from tests.unit.router.harness import Bus, SimClient, SimPeer, SimWorker

Way = Literal["in runs", "one by one", "step by step"]
GROUPS = ["prompt-1", "prompt-2"]
SESSIONS = ["chat-1"]
OPENED = pack(OpenSession("chat-1"))
COMPARED = [name for name in Request.__slots__ if name not in {"lane", "session"}]
RULES = ["any", "any", "any", "latest", "min:1", "exact:2", "max-staleness:1", "min:x"]
FAILED = Problem("engine_failed", "no", "failed")


class Restless(Health):
    """Always takes a closer look."""

    @property
    def is_calm(self) -> bool:
        """Never."""
        return False


class Fleet:
    """Three unlike workers and two clients that say the same to a router in one of three ways."""

    def __init__(self, way: Way, *, has_store: bool, is_recovering: bool) -> None:
        self.bus = Bus(seed=5, recovered=not is_recovering)
        if way != "in runs":
            self.bus.core._runs_from_client.clear()
            self.bus.core._runs_from_member.clear()
        if way == "step by step":
            self.bus.core._health.__class__ = Restless
        if has_store:
            self.bus.store({"default": 2})
        unlike = ((8, 2), (3, 2), (2, 3))
        self.workers: list[SimWorker] = [
            self.bus.worker(f"w{n}", slots=slots, version=version)
            for n, (slots, version) in enumerate(unlike)
        ]
        self.clients: list[SimClient] = [self.bus.client("trainer"), self.bus.client("eval")]
        judge = self.bus.core.context.clients.named("eval")
        assert judge is not None
        judge.principal = "evaluation"
        self.bus.advance(1.0)
        self.heard()
        self.n_runs = 0
        self._count_runs()

    def say(self, name: str, batch: list[Entry]) -> None:
        """One of them says this."""
        peers: list[SimPeer] = [*self.workers, *self.clients]
        (peer,) = [each for each in peers if each.name == name]
        peer.say(*batch)

    def heard(self) -> dict[str, list[Entry]]:
        """What each has heard since the last call, lease answers left out."""
        peers: list[SimPeer] = [*self.workers, *self.clients]
        told = {
            peer.name: [each for each in peer.heard if each.kind not in {"lease", "members"}]
            for peer in peers
        }
        for peer in peers:
            peer.heard.clear()
        return told

    def state(self) -> dict[str, Any]:
        """What the router knows."""
        core = self.bus.core
        requests = list(core.table)
        workers = core.context.members.workers()
        stuck = [(each, core.affinity.sessions.get(each)) for each in SESSIONS]
        grouped = [(each, core.affinity.groups.get(each)) for each in GROUPS]
        return {
            "requests": [[getattr(each, name) for name in COMPARED] for each in requests],
            "sessions": [each.session and each.session.name for each in requests],
            "sent": list(core.table.sent),
            "waiting": [each.rid for each in core.table.waiting],
            "n_arrived": core.table.n_arrived,
            "workers": [
                (each.name, each.requests, each.outstanding_cost, each.free_index, each.blocked_by)
                for each in workers
            ],
            "sticky": stuck + grouped,
            "counters": core.context.counters,
        }

    def _count_runs(self) -> None:
        """Only runs ask for a chooser."""
        placer = self.bus.core.placer
        chooser = placer.chooser

        def counted(place: Placement, rule: VersionRule | None) -> Rest:
            self.n_runs += 1
            return chooser(place, rule)

        placer.chooser = counted


def _asked(chance: Random, client: SimClient) -> list[Entry]:
    """A batch of a client: runs of like requests, some to be refused, some sent twice."""
    batch: list[Entry] = []
    while len(batch) < 12:
        asked: dict[str, Any] = {
            "versions": chance.choice(RULES),
            "group": chance.choice(["", "", *GROUPS]),
            "session": chance.choice(["", "", "", *SESSIONS]),
            "outlives_client": chance.random() < 0.1,
            "resend": chance.random() < 0.1,
            "worker": chance.choice(["", "", "", "", "", "w0", "w1", "w9"]),
            "priority": chance.choice([0] * 9 + [5, 101]),
        }
        place = Placement("default", cost=chance.choice([10, 10, 80, 0]), **asked)
        for _ in range(chance.randint(1, 5)):
            rid = chance.choice([*[client.next_rid()] * 12, f"{client.name}/01", "other/1"])
            route = "worker:w0" if chance.random() < 0.05 else ""
            deadline_ms = 0 if chance.random() < 0.05 else chance.randint(1000, 50_000)
            kind = "abort" if chance.random() < 0.05 else "generate"
            body = pack(Abort([])) if kind == "abort" else NO_BODY
            batch.append(Entry(kind, rid, NO_ATTEMPT, "", route, deadline_ms, place, body))
            if chance.random() < 0.05:
                batch.append(batch[-1])
    return batch


def _answered(
    chance: Random, worker: SimWorker, commands: list[Entry], *, has_failures: bool
) -> list[Entry]:
    """A batch of a worker: results of some of its commands, some twice, some of other attempts."""
    chance.shuffle(commands)
    batch: list[Entry] = []
    for command in [commands.pop() for _ in range(chance.randint(0, len(commands)))]:
        kinds = ["finished"] * 8 + ["cancelled"] + ["failed"] * has_failures
        kind = chance.choice(kinds)
        body = pack(FAILED) if kind == "failed" else NO_BODY
        attempt = command.attempt if chance.random() < 0.9 else (1, 999_999)
        batch.append(Entry(kind, command.rid, attempt, worker.epoch, command.route, body=body))
        if chance.random() < 0.1:
            batch.append(batch[-1])
        if attempt != command.attempt:
            commands.append(command)
    return batch


class Play:
    """The same, said to three routers; each must say and know the same as the others."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        has_store, is_recovering = self.chance.random() < 0.8, self.chance.random() < 0.2
        self.fleets = [
            Fleet(way, has_store=has_store, is_recovering=is_recovering) for way in get_args(Way)
        ]
        first = self.fleets[0]
        self.clients, self.workers = first.clients, first.workers
        self.commands: dict[str, list[Entry]] = {worker.name: [] for worker in self.workers}
        self.endings: dict[str, list[Entry]] = {client.name: [] for client in self.clients}
        self.has_failures = self.chance.random() < 0.3
        if self.chance.random() < 0.3:
            session = Entry("open_session", "trainer/s", deadline_ms=9000, body=OPENED)
            self.say("trainer", [session])

    def say(self, name: str, batch: list[Entry]) -> None:
        """One peer says this to each router."""
        for fleet in self.fleets:
            fleet.say(name, batch)
        self.compare()

    def compare(self) -> None:
        """All have said the same, and know the same."""
        told, *others = [fleet.heard() for fleet in self.fleets]
        assert others == [told, told]
        state, *states = [fleet.state() for fleet in self.fleets]
        assert states == [state, state]
        for worker in self.workers:
            kept = [each for each in told[worker.name] if each.kind == "generate"]
            self.commands[worker.name] += kept
        for client in self.clients:
            kept = [each for each in told[client.name] if each.kind in {"finished", "failed"}]
            self.endings[client.name] += [each for each in kept if each.route]

    def turn(self) -> None:
        """Each says something, perhaps."""
        chance = self.chance
        if chance.random() < 0.2:
            seconds = chance.choice([0.25, 1.0])
            for fleet in self.fleets:
                fleet.bus.advance(seconds)
            self.compare()
        for client in self.clients:
            if chance.random() < 0.5:
                self.say(client.name, _asked(chance, client))
        for worker in self.workers:
            commands = self.commands[worker.name]
            batch = _answered(chance, worker, commands, has_failures=self.has_failures)
            if batch and chance.random() < 0.1:  # one that has nothing to do with them
                self.say(chance.choice(self.workers).name, batch)
            if batch:
                self.say(worker.name, batch)
        for client in self.clients:
            endings, self.endings[client.name] = self.endings[client.name], []
            acks = [
                Entry(
                    "ack", route=f"worker:{each.route}", body=pack(Ack([(each.rid, each.attempt)]))
                )
                for each in endings
            ]
            if acks:
                self.say(client.name, acks)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n_turns=st.integers(1, 12))
def test_nobody_can_tell_which_way_a_request_went(seed: int, n_turns: int) -> None:
    print(f"seed {seed}")
    play = Play(seed)
    for _ in range(n_turns):
        play.turn()
    assert [fleet.n_runs for fleet in play.fleets[1:]] == [0, 0]


def test_runs_are_taken_at_once() -> None:
    plays = [Play(seed) for seed in range(4)]
    for play in plays:
        for _ in range(12):
            play.turn()
    assert sum(play.fleets[0].n_runs for play in plays) > 12


def _say_run(client: SimClient, rids: list[str]) -> None:
    place = Placement("default", cost=10)
    client.say(*[Entry("generate", rid, deadline_ms=9000, place=place) for rid in rids])


def test_a_run_fills_the_free_places_and_the_rest_waits_in_order() -> None:
    bus = Bus()
    worker, client = bus.worker(slots=4), bus.client()
    rids = [client.next_rid() for _ in range(10)]
    _say_run(client, rids)
    first = worker.take("generate")
    assert [each.rid for each in first] == rids[:6]  # its slots, and a small queue
    for command in first:
        worker.end(command)
    assert [each.rid for each in client.take("finished")] == rids[:6]
    assert [each.rid for each in worker.take("generate")] == rids[6:]


def test_one_that_must_be_refused_does_not_hold_up_those_behind_it() -> None:
    bus = Bus()
    worker, client = bus.worker(slots=8), bus.client()
    _say_run(client, ["trainer/1", "trainer/02", "trainer/3"])
    assert [each.rid for each in worker.take("generate")] == ["trainer/1", "trainer/3"]
    assert client.problem().field == "rid"


def test_those_of_a_worker_that_leaves_wait_in_the_order_they_came_in() -> None:
    bus = Bus()
    leaving, client = bus.worker(slots=16), bus.client()
    rids = [client.next_rid() for _ in range(12)]
    _say_run(client, rids)
    leaving.is_alive = False
    leaving.say(Entry("goodbye", epoch=leaving.epoch, body=pack(Goodbye())))
    worker = bus.worker("w1", slots=16)
    assert [each.rid for each in worker.take("generate")] == rids


def test_a_worker_on_probation_gets_one_of_a_run() -> None:
    bus = Bus()
    worker, client = bus.worker(slots=16), bus.client()
    for _ in range(5):
        client.generate(deadline_s=100)
        worker.end(worker.heard_one("generate"), "failed", FAILED)
        client.acknowledge(client.heard_one("failed"))
    bus.advance(10.5)
    _say_run(client, [client.next_rid() for _ in range(5)])
    assert len(worker.take("generate")) == 1
