"""The express lane does what the ordinary way does.

A request that waits for a policy that nobody serves keeps the express lane closed and changes
nothing else: of two routers that hear the same, one has such a request.
"""

from random import Random
from typing import Any

import pytest

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import NO_BODY, Entry, Placement
from rolloutbus.bus.wire.ids import NO_ATTEMPT
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Abort
from rolloutbus.bus.wire.messages.membership import Goodbye
from rolloutbus.bus.wire.versions import VersionRule
from tests.unit.router.harness import Bus, SimClient, SimPeer, SimWorker

RULES = ["any", "any", "any", "latest", "min:1", "exact:2", "max-staleness:1", "min:x"]
N_TURNS = 30
FAILED = Problem("engine_failed", "no", "failed")


class Fleet:
    """Three unlike workers and two clients; what each heard is kept."""

    def __init__(self, *, is_express: bool) -> None:
        self.bus = Bus(seed=5)
        self.bus.store({"default": 2})
        unlike = ((8, 2), (3, 2), (2, 3))
        self.workers: list[SimWorker] = [
            self.bus.worker(f"w{n}", slots=slots, version=version)
            for n, (slots, version) in enumerate(unlike)
        ]
        self.clients: list[SimClient] = [self.bus.client("trainer"), self.bus.client("eval")]
        self.commands: dict[str, list[Entry]] = {worker.name: [] for worker in self.workers}
        self.endings: dict[str, list[Entry]] = {client.name: [] for client in self.clients}
        if not is_express:
            self.bus.client("patient").generate(policy="nobody", deadline_s=3600)
        self.bus.advance(1.0)
        self.n_runs = 0
        self._count_runs()

    def _count_runs(self) -> None:
        """Only the express lane asks for a chooser."""
        placer = self.bus.core.table.placer
        chooser = placer.chooser

        def counted(place: Placement, rule: VersionRule | None, committed: int) -> Any:  # noqa: ANN401 - as wrapped
            self.n_runs += 1
            return chooser(place, rule, committed)

        placer.chooser = counted

    def heard(self) -> list[tuple[str, list[Entry]]]:
        """What each has heard since the last call, lease answers left out."""
        peers: list[SimPeer] = [*self.workers, *self.clients]
        told: list[tuple[str, list[Entry]]] = []
        for peer in peers:
            entries = [each for each in peer.heard if each.kind not in {"lease", "members"}]
            peer.heard.clear()
            told.append((peer.name, entries))
            if isinstance(peer, SimWorker):
                self.commands[peer.name] += [each for each in entries if each.kind == "generate"]
            else:
                self.endings[peer.name] += [each for each in entries if each.kind == "finished"]
        return told


def _asked(chance: Random, client: SimClient) -> list[Entry]:
    """A batch of a client: runs of like requests, some to be refused, some sent twice."""
    batch: list[Entry] = []
    while len(batch) < 12:
        asked: dict[str, Any] = {
            "versions": chance.choice(RULES),
            "group": chance.choice(["", "", "prompt-1", "prompt-2"]),
            "session": chance.choice(["", "", "", "chat-1"]),
            "outlives_client": chance.random() < 0.1,
            "priority": chance.choice([0] * 9 + [101]),
        }
        place = Placement("default", cost=chance.choice([10, 80]), **asked)
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


def _answered(chance: Random, worker: SimWorker, commands: list[Entry]) -> list[Entry]:
    """A batch of a worker: results of some of its commands, some twice, some of other attempts."""
    chance.shuffle(commands)
    batch: list[Entry] = []
    for command in [commands.pop() for _ in range(chance.randint(0, len(commands)))]:
        kind = chance.choice(["finished"] * 8 + ["cancelled"])
        attempt = command.attempt if chance.random() < 0.9 else (1, 999_999)
        batch.append(Entry(kind, command.rid, attempt, worker.epoch, command.route))
        if chance.random() < 0.1:
            batch.append(batch[-1])
        if attempt != command.attempt:
            commands.append(command)
    return batch


def _play(fleet: Fleet, seed: int) -> list[Any]:
    chance = Random(seed)
    seen: list[Any] = []
    for _ in range(N_TURNS):
        for client in fleet.clients:
            if chance.random() < 0.5:
                client.say(*_asked(chance, client))
                seen.append(fleet.heard())
        for worker in fleet.workers:
            batch = _answered(chance, worker, fleet.commands[worker.name])
            if batch and chance.random() < 0.1:  # one that has nothing to do with them
                chance.choice(fleet.workers).say(*batch)
            if batch:
                worker.say(*batch)
                seen.append(fleet.heard())
        for client in fleet.clients:
            for ending in fleet.endings[client.name]:
                client.acknowledge(ending)
            fleet.endings[client.name].clear()
    return seen


@pytest.mark.parametrize("seed", range(60))
def test_nobody_can_tell_which_way_a_request_went(seed: int) -> None:
    print(f"seed {seed}")
    express, ordinary = Fleet(is_express=True), Fleet(is_express=False)
    assert _play(express, seed) == _play(ordinary, seed)
    assert len(ordinary.bus.core.table) == len(express.bus.core.table) + 1
    assert express.n_runs > ordinary.n_runs == 0, "both went the same way: nothing was compared"


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
