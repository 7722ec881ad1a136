"""The shipped cores as one process would drive them, without sockets: what each is given to do.

Peers are scripted and answer at once. Each entry crosses the codec. A meter measures only what the
router, the client or the worker does, and nothing of its scripted peers. `work_counts.py` counts
that work, `scale.py` times it.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import ParamSpec, Protocol, TypeVar

import msgspec
import numpy as np
import xxhash

from rolloutbus.bus.actor.effects import Publish, Send, SendAll
from rolloutbus.bus.wire.codec import decode_batch, encode_batch, frames_of, pack
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Attempt, Entry, Peer, Placement
from rolloutbus.bus.wire.messages.endings import Accepted, Ack
from rolloutbus.bus.wire.messages.generation import (
    Abort,
    Deltas,
    Generate,
    Generated,
    OpenSession,
    SamplingParams,
)
from rolloutbus.bus.wire.messages.host import EngineReady
from rolloutbus.bus.wire.messages.membership import (
    Heartbeat,
    Hello,
    Lease,
    Member,
    Welcome,
    WorkerFacts,
)
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.engine_worker.worker.controller import HOST_COMMANDS
from rolloutbus.engine_worker.worker.core import WorkerCore
from rolloutbus.engine_worker.worker.effects import WorkerEffect
from rolloutbus.router.core import RouterCore
from rolloutbus.router.events import Event, Received, Ticked
from rolloutbus.router.settings import RouterSettings
from rolloutbus.trainer_adapter.client.core.core import ClientCore
from rolloutbus.trainer_adapter.client.core.effects import Complete, Deliver
from rolloutbus.trainer_adapter.client.core.effects import Effect as ClientEffect
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.results import Rollout
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings

P = ParamSpec("P")
R = TypeVar("R")
BATCH = 64
"""Requests that are submitted in one frame."""
DEADLINE_MS = 600_000
TICK_S = 0.05
BODY = msgspec.Raw(msgspec.msgpack.encode(bytes(198)))
"""200 bytes of MessagePack; the router does not look inside."""
N_TOKENS = 8
PROMPT = np.arange(1, 33, dtype="<i4").tobytes()
SAMPLING = SamplingParams(max_new_tokens=N_TOKENS, ignore_eos=True)
GENERATE = Generate(PROMPT, SAMPLING, stream=True)
PLACE = Placement("default", cost=len(PROMPT) // 4 + N_TOKENS)
UNMET = msgspec.structs.replace(PLACE, versions="min:9")
"""Weights that no worker has."""
BOUNDED = msgspec.structs.replace(PLACE, versions="max-staleness:2")
"""What a trainer asks for that bounds the staleness of its samples."""
RESULT = Generated(
    tokens=np.arange(N_TOKENS, dtype="<i4").tobytes(),
    logprobs=np.zeros(N_TOKENS, "<f4").tobytes(),
    versions=[(0, N_TOKENS)],
    finish_reason="length",
    digest=xxhash.xxh3_64_intdigest(np.arange(N_TOKENS, dtype="<i4").tobytes()),
    n_prompt_tokens=len(PROMPT) // 4,
)


class Meter(Protocol):
    """What is used up by the calls that go through it."""

    @property
    def total(self) -> int:
        """So far."""
        ...

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, and add what it uses."""
        ...


class Unmetered:
    """Measures nothing: while a path is prepared, and on its other side."""

    total = 0

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function."""
        return function(*args, **kwargs)


class CpuMeter:
    """Nanoseconds of CPU time of this thread."""

    def __init__(self) -> None:
        self.total = 0

    def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, and add the time that it takes."""
        begun_at = time.thread_time_ns()
        found = function(*args, **kwargs)
        self.total += time.thread_time_ns() - begun_at
        return found


def held_bytes(grow: Callable[[], None]) -> int:
    """Bytes that Python holds afterwards and did not hold before."""
    gc.collect()
    tracemalloc.start()
    try:
        grow()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


class RoutedFleet:
    """A router with scripted workers and one scripted client."""

    def __init__(
        self, n_workers: int, slots: int = 256, place: Placement = PLACE, frames_per_turn: int = 1
    ) -> None:
        """All have joined; `slots` of each worker. Unmetered until `meter` is set.

        `frames_per_turn`: what so many frames of workers lead to leaves together; one: the router
        has nothing else to do, DRAIN_MESSAGES: it is as busy as it can be.
        """
        self._place = place
        self._frames_per_turn = frames_per_turn
        settings = RouterSettings("ipc:///f", "ipc:///b", queue_limit=100_000, seed=1)
        self._core = RouterCore(settings, "benchmark", Random(1))
        self.meter: Meter = Unmetered()
        self.now = 1000.0
        self._n = 0
        self.n_frames = 0
        """In and out."""
        self.n_entries = 0
        self._client = Peer((1).to_bytes(16, "big"))
        self._workers = {
            Peer((number + 2).to_bytes(16, "big")): f"w{number}" for number in range(n_workers)
        }
        self._heartbeats = 0
        self._running: dict[Peer, dict[str, Attempt]] = {peer: {} for peer in self._workers}
        self._core.handle(Ticked(), self.now)
        for _ in range(round(4.0 / TICK_S)):  # a new router first waits for who knows it
            self.tick()
        self._join(slots)

    def tick(self) -> None:
        """Time passes."""
        self.now += TICK_S
        self.meter.run(self._core.handle, Ticked(), self.now)

    def heartbeats(self) -> None:
        """Every worker says what it runs."""
        self._heartbeats += 1
        for peer in self._workers:
            running = [(rid, attempt, "c") for rid, attempt in self._running[peer].items()]
            beat = Heartbeat(self._heartbeats, 0, "ready", running=running)
            self._deliver(peer, [Entry("beat", epoch=self._epoch(peer), body=pack(beat))])

    def submit(self, n: int) -> dict[Peer, list[Entry]]:
        """One frame of so many requests; returns what each worker is told to run."""
        entries = [
            Entry("generate", self._rid(), NO_ATTEMPT, "", "", DEADLINE_MS, self._place, BODY)
            for _ in range(n)
        ]
        return self._sent(self._deliver(self._client, entries))

    def refused(self, n: int) -> None:
        """So many requests that no worker can serve, one by one, each aborted by its client."""
        for _ in range(n):
            assert not self.submit(1)
            ask = Entry("abort", self._rid(), body=pack(Abort([f"c/{self._n - 1}"])))
            self._deliver(self._client, [ask])

    def accept(self, commands: dict[Peer, list[Entry]]) -> None:
        """The workers begin these."""
        said: list[tuple[Peer, list[Entry]]] = []
        for peer, entries in commands.items():
            items = [(each.rid, each.attempt) for each in entries]
            self._running[peer].update(items)
            body = pack(Accepted(items))
            said.append((peer, [Entry("accepted", epoch=self._epoch(peer), body=body)]))
        self._deliver_in_turns(said)

    def finish(self, commands: dict[Peer, list[Entry]]) -> None:
        """The workers end these, each in one frame; the client acknowledges all in one."""
        acks: list[Entry] = []
        said: list[tuple[Peer, list[Entry]]] = []
        for peer, entries in commands.items():
            running = self._running[peer]
            for entry in entries:
                del running[entry.rid]
            epoch = self._epoch(peer)
            endings = [
                Entry("finished", each.rid, each.attempt, epoch, each.route, 0, None, BODY)
                for each in entries
            ]
            said.append((peer, endings))
            items = [(each.rid, each.attempt) for each in entries]
            acks.append(Entry("ack", route=f"worker:{self._workers[peer]}", body=pack(Ack(items))))
        self._deliver_in_turns(said)
        self._deliver(self._client, acks)

    def round_trips(self, n: int, per_frame: int = BATCH) -> None:
        """So many requests from their submission to the acknowledgement, `per_frame` at a time."""
        for _ in range(n // per_frame):
            commands = self.submit(per_frame)
            self.accept(commands)
            self.finish(commands)

    def keep_open(self, n: int) -> None:
        """So many requests begin and do not end."""
        for _ in range(n // BATCH):
            self.accept(self.submit(BATCH))

    def open_sessions(self, n: int) -> None:
        """So many sessions, all idle."""
        for _ in range(n):
            body = pack(OpenSession(f"session-{self._n}", lease_s=3600.0))
            ask = Entry("open_session", self._rid(), NO_ATTEMPT, "", "", DEADLINE_MS, None, body)
            answers = self._deliver(self._client, [ask])[self._client]
            assert answers[-1].kind == "finished", answers

    def _join(self, slots: int) -> None:
        facts = WorkerFacts("default", "ipc:///s", slots, 4096, 32_000, "fake", ["generate"])
        for peer, name in self._workers.items():
            hello = Hello("worker", name, peer.hex(), self._epoch(peer), worker=facts)
            self._deliver(peer, [Entry("hello", body=pack(hello))])
        self.heartbeats()
        self._deliver(self._client, [Entry("hello", body=pack(Hello("client", "c", "0" * 32)))])

    def _deliver_in_turns(self, said: list[tuple[Peer, list[Entry]]]) -> None:
        for first in range(0, len(said), self._frames_per_turn):
            self._heard(said[first : first + self._frames_per_turn])

    def _deliver(self, peer: Peer, entries: list[Entry]) -> dict[Peer, list[Entry]]:
        """What the router sends in answer to one frame."""
        return self._heard([(peer, entries)])

    def _heard(self, said: list[tuple[Peer, list[Entry]]]) -> dict[Peer, list[Entry]]:
        """What the router sends in answer to the frames of one turn."""
        turn = [(peer, encode_batch(entries)) for peer, entries in said]
        frames = self.meter.run(self._routed, turn)
        self.n_entries += sum(len(entries) for _, entries in said)
        self.n_frames += len(turn) + len(frames)
        heard: dict[Peer, list[Entry]] = {}
        for to, frame in frames:
            answers = decode_batch(frame)
            self.n_entries += len(answers)
            heard.setdefault(to, []).extend(answers)
        return heard

    def _routed(self, turn: list[tuple[Peer, bytes]]) -> list[tuple[Peer, bytes]]:
        """What a router does between its sockets in one turn of its loop."""
        queues: dict[Peer, list[Entry]] = {}
        for peer, frame in turn:
            event: Event = Received(peer, decode_batch(frame))
            for effect in self._core.handle(event, self.now):
                if not isinstance(effect, SendAll):
                    continue
                queue = queues.setdefault(effect.peer, effect.entries)
                if queue is not effect.entries:
                    queue += effect.entries
        return [
            (peer, encode_batch(batch))
            for peer, entries in queues.items()
            for batch in frames_of(entries)
        ]

    def _sent(self, heard: dict[Peer, list[Entry]]) -> dict[Peer, list[Entry]]:
        commands = {peer: entries for peer, entries in heard.items() if peer in self._workers}
        assert sum(map(len, commands.values())) == len(
            [each for entries in commands.values() for each in entries if each.kind == "generate"]
        ), heard
        return commands

    def _epoch(self, peer: Peer) -> str:
        return f"{peer.hex()}.1"

    def _rid(self) -> str:
        self._n += 1
        return f"c/{self._n}"


class StreamedRollouts:
    """A worker and a client: rollouts from the call to the result, each token streamed."""

    def __init__(self) -> None:
        """Both are connected. Unmetered until the meters are set."""
        self.client_meter: Meter = Unmetered()
        self.worker_meter: Meter = Unmetered()
        self._now = 1000.0
        self._client = ClientCore(ClientSettings("c", "ipc:///f"), "0" * 32, Random(1))
        self._worker = WorkerCore(
            WorkerSettings("w", "ipc:///b"), "1" * 32, "ipc:///s", 1, Random(2)
        )
        self._n_attempts = 0
        self.n_delivered = 0
        """Tokens handed to readers."""
        self.n_completed = 0
        self._join()

    def rollouts(self, n: int) -> None:
        """So many at once, a token of each per step of the engine."""
        commands = self._submitted(n)
        self._client_heard(self._worker_heard(commands))
        for index in range(N_TOKENS):
            self._client_heard(self._worker_steps(commands, index))

    def _join(self) -> None:
        self._client.start(self._now)
        member = Member("w", "b.1", "ipc:///s", "live", 0, "default")
        welcome = Entry("welcome", body=pack(Welcome(1, "r", 1, [member])))
        self._client.receive([welcome], self._now)
        self._worker.start(self._now)
        ready = EngineReady("fake", 64, 128, 256, [0], sorted(HOST_COMMANDS))
        said = self._worker.host([Entry("engine_ready", body=pack(ready))], self._now)
        seqs = [
            msgspec.msgpack.decode(each.entry.body)["seq"]
            for each in [*said, *self._worker.flush(self._now)]
            if isinstance(each, Send) and each.entry.kind == "beat"
        ]
        lease = Entry("lease", body=pack(Lease(1, "r", seqs[-1])))
        self._worker.bus([lease], self._now)

    def _submitted(self, n: int) -> list[Entry]:
        """Commands as the router passes them on."""
        asks: list[Entry] = []
        for _ in range(n):
            asks += decode_batch(self.client_meter.run(self._asked))
        epoch = self._worker.member.epoch
        commands: list[Entry] = []
        for ask in asks:
            self._n_attempts += 1
            attempt = (1, self._n_attempts)
            commands.append(msgspec.structs.replace(ask, attempt=attempt, epoch=epoch, route="c"))
        return commands

    def _asked(self) -> bytes:
        ask = Ask("generate", GENERATE, place=PLACE)
        _, effects = self._client.submit(ask, DEADLINE_MS / 1000, self._now)
        return encode_batch([each.entry for each in effects if isinstance(each, Send)])

    def _worker_heard(self, commands: list[Entry]) -> Sequence[WorkerEffect]:
        return self.worker_meter.run(self._worker_began, encode_batch(commands))

    def _worker_began(self, frame: bytes) -> Sequence[WorkerEffect]:
        entries = decode_batch(frame)
        effects = self._worker.bus(entries, self._now)
        return [*effects, *self._worker.flush(self._now)]

    def _worker_steps(self, commands: list[Entry], index: int) -> Sequence[WorkerEffect]:
        n = len(commands)
        is_last = index == N_TOKENS - 1
        step = Deltas(
            rids=[each.rid for each in commands],
            attempts=[each.attempt for each in commands],
            seqs=[index] * n,
            counts=[1] * n,
            tokens=np.full(n, index, "<i4").tobytes(),
            logprobs=np.zeros(n, "<f4").tobytes(),
            versions=[0] * n,
            finishes=[(row, "length") for row in range(n)] if is_last else [],
        )
        frame = encode_batch([Entry("deltas", body=pack(step))])
        return self.worker_meter.run(self._worker_stepped, frame)

    def _worker_stepped(self, frame: bytes) -> Sequence[WorkerEffect]:
        effects = self._worker.host(decode_batch(frame), self._now)
        return [*effects, *self._worker.flush(self._now)]

    def _client_heard(self, effects: Iterable[WorkerEffect]) -> None:
        """What the worker publishes and sends; then the client's tick, whose acks go back."""
        published: list[Entry] = []
        sent: list[Entry] = []
        for effect in effects:
            if isinstance(effect, Publish):
                published.append(effect.entry)
            elif isinstance(effect, Send):
                sent.append(msgspec.structs.replace(effect.entry, route="w"))
        if published:
            self._client_did(self.client_meter.run(self._streamed, encode_batch(published)))
        if sent:
            self._client_did(self.client_meter.run(self._received, encode_batch(sent)))
            self._client_did(self.client_meter.run(self._client.tick, self._now))

    def _streamed(self, frame: bytes) -> Sequence[ClientEffect]:
        return self._client.receive_stream(decode_batch(frame), self._now)

    def _received(self, frame: bytes) -> Sequence[ClientEffect]:
        return self._client.receive(decode_batch(frame), self._now)

    def _client_did(self, effects: Sequence[ClientEffect]) -> None:
        for effect in effects:
            match effect:
                case Deliver(_, delta):
                    self.n_delivered += len(delta.tokens)
                case Complete(_, Rollout()):
                    self.n_completed += 1
                case Complete(_, outcome):
                    msg = f"a rollout ended otherwise: {outcome!r}"
                    raise RuntimeError(msg)
                case Send(_, entry) if entry.kind == "ack":
                    self._worker.bus([entry], self._now)
                case _:
                    pass
