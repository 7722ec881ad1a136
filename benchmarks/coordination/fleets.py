"""Who gives requests to simulated engines: the shipped router core, or a balancer in front of them.

The router keeps what no engine has room for; a balancer decides at once, from the requests that it
has sent to each engine and that have not ended, and engines queue by themselves.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Protocol

import msgspec
import xxhash

from benchmarks.cache_aware import CacheAware
from benchmarks.coordination.engines import EngineShape, Job, SimEngine, VirtualTime
from rolloutbus.bus.actor.effects import SendAll
from rolloutbus.bus.prefix_hashes import MARKED_TOKENS, packed
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import pack, unpack_as
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Attempt, Entry, Peer, Placement
from rolloutbus.bus.wire.messages.endings import Accepted, Ack
from rolloutbus.bus.wire.messages.generation import Abort
from rolloutbus.bus.wire.messages.membership import Heartbeat, Hello, Prefixes, WorkerFacts
from rolloutbus.router.core import RouterCore
from rolloutbus.router.events import Effect, Event, Received, Ticked
from rolloutbus.router.settings import RouterSettings

CLIENT = Peer(bytes(16))
DEADLINE_MS = 10**9
REPORT_S = 0.05
"""Workers tell what is in their caches this often."""
TICK_S = 1.0
RECOVERY_S = 2e6
LEASES = LeaseSettings(
    heartbeat_s=1e5, lease_s=1e6, holder_s=8e5, silence_s=2e5, recovery_s=RECOVERY_S
)
"""Heartbeats of 512 engines would take most of a run, and nothing is decided by them here."""
MARKS_IN_ONE = 1000


class Fleet(Protocol):
    """Engines, and the way to them."""

    engines: list[SimEngine]
    serving: list[SimEngine]
    """Those that get new requests."""

    def join(self, shape: EngineShape) -> SimEngine:
        """One more engine."""
        ...

    def block(self, engine: SimEngine) -> None:
        """No new requests go there, unless they are moved."""
        ...

    def submit(self, jobs: Sequence[Job]) -> None:
        """Have these computed; `on_end` of each is called once, unless it is aborted."""
        ...

    def abort(self, job: Job) -> None:
        """Stop it, wherever it is."""
        ...

    def move(self, job: Job, engine: SimEngine) -> None:
        """Go on with it at this engine, with the tokens that it has."""
        ...


class Balancer(Protocol):
    """Chooses an engine for each request, for ever."""

    def choose(self, job: Job, engines: Sequence[SimEngine]) -> SimEngine:
        """Where the request goes."""
        ...


class AtRandom:
    """Any engine."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance

    def choose(self, job: Job, engines: Sequence[SimEngine]) -> SimEngine:
        """Any."""
        del job
        return self._chance.choice(engines)


class RoundRobin:
    """One engine after the other."""

    def __init__(self, chance: Random) -> None:
        del chance
        self._n = 0

    def choose(self, job: Job, engines: Sequence[SimEngine]) -> SimEngine:
        """The next one."""
        del job
        self._n += 1
        return engines[self._n % len(engines)]


class LeastLoaded:
    """The engine with the fewest requests."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance

    def choose(self, job: Job, engines: Sequence[SimEngine]) -> SimEngine:
        """One of those with the fewest."""
        del job
        return min(engines, key=lambda each: (each.load, self._chance.random()))


class ByCache:
    """Like SMG's `cache_aware`."""

    def __init__(self, chance: Random) -> None:
        self._placement = CacheAware(chance)

    def choose(self, job: Job, engines: Sequence[SimEngine]) -> SimEngine:
        """By the prompts that went there before."""
        loads = {each.name: each.load for each in engines}
        name = self._placement.choose(job.path, loads)
        return next(each for each in engines if each.name == name)


class Balanced:
    """Engines behind a balancer."""

    def __init__(
        self, time: VirtualTime, shape: EngineShape, n_engines: int, balancer: Balancer
    ) -> None:
        self._time, self._balancer = time, balancer
        self.engines: list[SimEngine] = []
        self.serving: list[SimEngine] = []
        for _ in range(n_engines):
            self.join(shape)

    def join(self, shape: EngineShape) -> SimEngine:
        """It is chosen from now on."""
        engine = SimEngine(f"w{len(self.engines)}", shape, self._time, _ended)
        self.engines.append(engine)
        self.serving.append(engine)
        return engine

    def block(self, engine: SimEngine) -> None:
        """It is not chosen any more."""
        self.serving.remove(engine)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Each goes to its engine at once."""
        for job in jobs:
            self._balancer.choose(job, self.serving).add(job)

    def abort(self, job: Job) -> None:
        """Stop it."""
        if job.engine is not None:
            job.engine.remove(job)

    def move(self, job: Job, engine: SimEngine) -> None:
        """Its prompt and tokens are computed there."""
        self.abort(job)
        engine.add(job)


def _ended(job: Job) -> None:
    job.engine = None
    job.on_end(job)


@dataclass(eq=False)
class _Lease:
    """What a simulated worker knows of its place on the bus."""

    engine: SimEngine
    peer: Peer
    epoch: str
    prefixes_seq: int = 0
    has_news: bool = False


class Routed:
    """Engines behind the router's core, with the client and the workers that it talks to.

    `uses_names`: requests name their session and group. `reports`: engines tell what they have
    cached, and requests bear the hashes of their prompts.
    """

    def __init__(
        self,
        time: VirtualTime,
        shape: EngineShape,
        n_engines: int,
        seed: int,
        *,
        uses_names: bool = False,
        reports: bool = False,
    ) -> None:
        self._time = time
        self._uses_names = uses_names
        self._reports = reports
        settings = RouterSettings("ipc:///f", "ipc:///b", LEASES, 1_000_000, client_grace_s=1e7)
        self.core = RouterCore(settings, "benchmark", Random(seed))
        self._rids: dict[Job, str] = {}
        self._jobs: dict[str, tuple[Job, str]] = {}
        """rid -> request, and the name of the engine that it is for; empty: of any."""
        self._attempts: dict[str, Attempt] = {}
        self._leases: dict[str, _Lease] = {}
        self._by_peer: dict[Peer, _Lease] = {}
        self._n = 0
        self.engines: list[SimEngine] = []
        self.serving: list[SimEngine] = []
        self._began_s = 0.0
        """The router's clock, less ours."""
        self._handle(Ticked())
        self._began_s = RECOVERY_S + 1  # a new router first waits for who knows it
        self._handle(Ticked())
        self._handle(Received(CLIENT, [Entry("hello", body=pack(Hello("client", "c", "0" * 32)))]))
        for _ in range(n_engines):
            self.join(shape)
        time.at(TICK_S, self._tick)

    def join(self, shape: EngineShape) -> SimEngine:
        """One more engine."""
        name = f"w{len(self.engines)}"
        news = self._note_news if self._reports else None
        engine = SimEngine(name, shape, self._time, self._ended, news)
        peer = Peer((len(self.engines) + 1).to_bytes(16, "big"))
        lease = _Lease(engine, peer, f"{peer.hex()}.1")
        self.engines.append(engine)
        self.serving.append(engine)
        self._leases[name] = self._by_peer[peer] = lease
        facts = WorkerFacts(
            "default", "ipc:///s", shape.max_running, 1 << 20, 32_000, "sglang", ["generate"]
        )
        hello = Hello("worker", name, peer.hex(), lease.epoch, worker=facts)
        self._handle(Received(peer, [Entry("hello", body=pack(hello))]))
        self._say(lease, [Entry("beat", epoch=lease.epoch, body=pack(Heartbeat(1)))])
        if self._reports:
            self._report(lease)
        return engine

    def block(self, engine: SimEngine) -> None:
        """It says that it drains."""
        self.serving.remove(engine)
        lease = self._leases[engine.name]
        rids = [self._rids[job] for job in (*engine.running, *engine.waiting)]
        running = [(rid, self._attempts[rid], "c") for rid in rids]
        beat = Heartbeat(2, 0, "draining", running=running)
        self._say(lease, [Entry("beat", epoch=lease.epoch, body=pack(beat))])

    def submit(self, jobs: Sequence[Job]) -> None:
        """All in one frame of the client."""
        self._submit((job, "") for job in jobs)

    def abort(self, job: Job) -> None:
        """By the client's command."""
        rid = self._rids.get(job)
        if rid is not None:
            body = pack(Abort([rid]))
            self._handle(Received(CLIENT, [Entry("abort", self._new_rid(), NO_ATTEMPT, body=body)]))
            self._forget(job)

    def move(self, job: Job, engine: SimEngine) -> None:
        """As a client does it: abort, and ask the named worker to go on."""
        self.abort(job)
        self._submit([(job, engine.name)])

    def _submit(self, jobs: Iterable[tuple[Job, str]]) -> None:
        entries: list[Entry] = []
        for job, worker in jobs:
            rid = self._new_rid()
            self._rids[job], self._jobs[rid] = rid, (job, worker)
            entries.append(
                Entry("generate", rid, NO_ATTEMPT, "", "", DEADLINE_MS, self._place(job, worker))
            )
        self._handle(Received(CLIENT, entries))

    def _place(self, job: Job, worker: str) -> Placement:
        place = Placement("default", cost=job.n_prompt + job.n_allowed, worker=worker)
        if self._uses_names and not worker:
            place = msgspec.structs.replace(place, session=job.session, group=job.group)
        return msgspec.structs.replace(place, marks=_marks_of(job)) if self._reports else place

    def _handle(self, event: Event) -> None:
        self._carry_out(self.core.handle(event, self._time.now + self._began_s))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendAll):
                lease = self._by_peer.get(effect.peer)
                if lease is not None:
                    self._worker_hears(lease, effect.entries)
                else:
                    _refuse_refusals(effect.entries)

    def _worker_hears(self, lease: _Lease, entries: Sequence[Entry]) -> None:
        begun: list[tuple[str, Attempt]] = []
        stopped: list[Entry] = []
        for entry in entries:
            if entry.kind == "generate":
                self._attempts[entry.rid] = entry.attempt
                begun.append((entry.rid, entry.attempt))
                lease.engine.add(self._jobs[entry.rid][0])
            elif entry.kind == "abort":
                for rid in unpack_as(Abort, entry).rids:
                    lease.engine.remove(self._jobs[rid][0])
                    attempt = self._attempts[rid]
                    stopped.append(Entry("cancelled", rid, attempt, lease.epoch, "c"))
        if begun:
            body = pack(Accepted(begun))
            self._say(lease, [Entry("accepted", epoch=lease.epoch, body=body)])
        if stopped:
            self._say(lease, stopped)
            self._acknowledge(lease, [(each.rid, each.attempt) for each in stopped])

    def _say(self, lease: _Lease, entries: list[Entry]) -> None:
        self._handle(Received(lease.peer, entries))

    def _ended(self, job: Job) -> None:
        assert job.engine is not None
        lease = self._leases[job.engine.name]
        rid = self._rids[job]
        attempt = self._attempts[rid]
        job.engine = None
        self._say(lease, [Entry("finished", rid, attempt, lease.epoch, "c")])
        self._acknowledge(lease, [(rid, attempt)])
        self._forget(job)
        job.on_end(job)

    def _acknowledge(self, lease: _Lease, items: list[tuple[str, Attempt]]) -> None:
        body = pack(Ack(items))
        self._handle(
            Received(CLIENT, [Entry("ack", route=f"worker:{lease.engine.name}", body=body)])
        )

    def _forget(self, job: Job) -> None:
        rid = self._rids.pop(job)
        del self._jobs[rid]
        self._attempts.pop(rid, None)

    def _new_rid(self) -> str:
        self._n += 1
        return f"c/{self._n}"

    def _tick(self) -> None:
        self._handle(Ticked())
        self._time.at(self._time.now + TICK_S, self._tick)

    def _note_news(self, engine: SimEngine) -> None:
        lease = self._leases[engine.name]
        if not lease.has_news:
            lease.has_news = True
            self._time.at(self._time.now + REPORT_S, lambda: self._report(lease))

    def _report(self, lease: _Lease) -> None:
        """Tell what has come into a cache and what has left it, in the order of these events."""
        lease.has_news = False
        cache = lease.engine.cache
        added, removed = _marks_in(cache.added), _marks_in(cache.removed)
        cache.added.clear()
        cache.removed.clear()
        first = 0
        while first == 0 or first < max(len(added), len(removed)):
            last = first + MARKS_IN_ONE
            news = Prefixes(
                lease.prefixes_seq, packed(added[first:last]), packed(removed[first:last])
            )
            lease.prefixes_seq += 1
            first = last
            self._say(lease, [Entry("prefixes", epoch=lease.epoch, body=pack(news))])


def _refuse_refusals(entries: Sequence[Entry]) -> None:
    """Nothing that the client asks for may be turned down in a run."""
    for entry in entries:
        if entry.kind in ("refused", "failed", "expired", "lost", "dismissed"):
            msg = f"the router said {entry.kind}: {bytes(entry.body)!r}"
            raise RuntimeError(msg)


@cache
def _mark(name: str, n_tokens: int) -> int:
    """As if the tokens of each beginning were others than those of all the rest."""
    return xxhash.xxh3_64_intdigest(f"{name}:{n_tokens}".encode())


def _marks_in(parts: Sequence[tuple[str, int, int]]) -> list[int]:
    return [_mark(name, n) for name, start, end in parts for n in MARKED_TOKENS if start < n <= end]


def _marks_of(job: Job) -> bytes:
    marks: list[int] = []
    start = 0
    for name, end in job.path:
        marks += _marks_in([(name, start, end)])
        start = end
    return packed(marks)


FleetMaker = Callable[[VirtualTime, EngineShape, int, int], Fleet]
"""(time, shape, number of engines, seed) -> the engines and the way to them."""


def _balanced(kind: Callable[[Random], Balancer]) -> FleetMaker:
    def make(time: VirtualTime, shape: EngineShape, n_engines: int, seed: int) -> Fleet:
        return Balanced(time, shape, n_engines, kind(Random(seed)))

    return make


def _routed(*, uses_names: bool = False, reports: bool = False) -> FleetMaker:
    def make(time: VirtualTime, shape: EngineShape, n_engines: int, seed: int) -> Fleet:
        return Routed(time, shape, n_engines, seed, uses_names=uses_names, reports=reports)

    return make


WAYS: dict[str, FleetMaker] = {
    "random": _balanced(AtRandom),
    "round_robin": _balanced(RoundRobin),
    "least_loaded": _balanced(LeastLoaded),
    "cache_aware": _balanced(ByCache),
    "bus": _routed(),
    "bus_names": _routed(uses_names=True),
    "bus_prefixes": _routed(reports=True),
    "bus_both": _routed(uses_names=True, reports=True),
}
"""By name: balancers, then the bus with load only, named sessions and groups, reported prefixes."""
