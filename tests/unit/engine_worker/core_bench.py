"""A worker core between a scripted router and a scripted engine host."""

import random

import numpy as np

from rolloutbus.bus.actor.effects import Publish, Send
from rolloutbus.bus.actor.loop import ManualClock
from rolloutbus.bus.wire.codec import pack, unpack, unpack_result
from rolloutbus.bus.wire.entry import Attempt, Entry, Placement
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import (
    Deltas,
    FinishReason,
    Generate,
    Generated,
    Prefix,
    SamplingParams,
)
from rolloutbus.bus.wire.messages.host import EngineHeartbeat, EngineReady
from rolloutbus.bus.wire.messages.membership import Heartbeat, Lease
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.engine_worker.worker.controller import HOST_COMMANDS
from rolloutbus.engine_worker.worker.core import WorkerCore
from rolloutbus.engine_worker.worker.effects import ToHost, WorkerEffect

READY = EngineReady(
    *("fake", 64, 128, 4, [0], sorted(HOST_COMMANDS)),
    features=["min_new_tokens", "seed"],
    parallel={"tp": 2},
    software={"fake": "1"},
)
KINDS_OF_ENDINGS = {"finished", "failed", "cancelled", "expired", "refused"}


class Said:
    """Everything a worker has asked for."""

    def __init__(self, effects: list[WorkerEffect]) -> None:
        self.effects = effects

    def sent(self, kind: str, rid: str | None = None) -> list[Entry]:
        entries = [e.entry for e in self.effects if isinstance(e, Send)]
        return [e for e in entries if e.kind == kind and rid in (None, e.rid)]

    def to_host(self, kind: str) -> list[Entry]:
        return [e.entry for e in self.effects if isinstance(e, ToHost) and e.entry.kind == kind]

    def ending(self, rid: str) -> Entry:
        (ending,) = [
            e.entry
            for e in self.effects
            if isinstance(e, Send) and e.entry.rid == rid and e.entry.kind in KINDS_OF_ENDINGS
        ]
        return ending

    def problem(self, rid: str) -> tuple[str, str, str]:
        ending = self.ending(rid)
        body = unpack(ending)
        assert isinstance(body, Problem)
        return ending.kind, body.code, body.field

    def result(self, rid: str) -> Generated:
        body = unpack_result("generate", self.ending(rid))
        assert isinstance(body, Generated)
        return body

    def heartbeat(self) -> Heartbeat:
        heartbeat = unpack(self.sent("beat")[-1])
        assert isinstance(heartbeat, Heartbeat)
        return heartbeat

    def rows(self) -> list[tuple[str, Attempt, int, list[int], int]]:
        """(rid, attempt, seq, tokens, version) of everything published."""
        found: list[tuple[str, Attempt, int, list[int], int]] = []
        for effect in self.effects:
            body = unpack(effect.entry) if isinstance(effect, Publish) else None
            if not isinstance(body, Deltas):
                continue
            tokens, start = np.frombuffer(body.tokens, np.int32).tolist(), 0
            for row, rid in enumerate(body.rids):
                stop = start + body.counts[row]
                part = tokens[start:stop]
                found.append((rid, body.attempts[row], body.seqs[row], part, body.versions[row]))
                start = stop
        return found


LONG = SamplingParams(max_new_tokens=100)


class Bench:
    """A worker core between a scripted router and a scripted engine host."""

    def __init__(self, settings: WorkerSettings | None = None, *, drain_s: float = 0.0) -> None:
        self.clock = ManualClock()
        settings = settings or WorkerSettings("w0", "ipc:///r", drain_s=drain_s)
        self.core = WorkerCore(settings, "b0" * 16, "ipc:///s", 1, random.Random(3))
        self.said = Said(self.core.start(self.now))
        self.steps = 0
        self.version = 0

    @property
    def now(self) -> float:
        return self.clock.now()

    def collect(self, effects: list[WorkerEffect]) -> None:
        self.said.effects += effects
        self.said.effects += self.core.flush(self.now)

    def router(self, *entries: Entry) -> None:
        self.collect(self.core.bus(entries, self.now))

    def host(self, *entries: Entry) -> None:
        self.collect(self.core.host(entries, self.now))

    def join(self) -> None:
        self.host(Entry("engine_ready", body=pack(READY)))
        self.lease()

    def lease(self) -> None:
        self.router(Entry("lease", body=pack(Lease(1, "r", self.said.heartbeat().seq))))

    def pass_time(self, seconds: float, *, heartbeats: bool = True) -> None:
        for _ in range(round(seconds / 0.05)):
            self.clock.advance(0.05)
            n_heartbeats = len(self.said.sent("beat"))
            self.collect(self.core.tick(self.now))
            if heartbeats:
                self.engine_heartbeat()
            if len(self.said.sent("beat")) > n_heartbeats:
                self.lease()

    def told_to_leave(self) -> None:
        """SIGTERM."""
        self.collect(self.core.drain(self.now))

    def engine_heartbeat(self, *, torn: bool = False) -> None:
        heartbeat = EngineHeartbeat(self.steps, 0, 0, 0, self.version, torn)
        self.host(Entry("engine_beat", body=pack(heartbeat)))

    def command(
        self,
        kind: str,
        rid: str,
        body: object,
        place: Placement | None = None,
        deadline_s: float = 5.0,
    ) -> None:
        packed = pack(body)  # type: ignore[arg-type] - every body is a struct
        epoch = self.core.member.epoch
        self.router(
            Entry(kind, rid, (1, 1), epoch, "client", round(1000 * deadline_s), place, packed)
        )

    def generate(
        self,
        rid: str,
        *,
        stream: bool = False,
        versions: str = "any",
        prefix: Prefix | None = None,
        deadline_s: float = 5.0,
        prompt: tuple[int, ...] = (1, 2),
        sampling: SamplingParams = LONG,
    ) -> None:
        body = Generate(
            np.array(prompt, np.int32).tobytes(),
            sampling,
            stream=stream,
            prefix=prefix,
        )
        self.command("generate", rid, body, Placement("default", versions), deadline_s)

    def step(
        self,
        rows: dict[str, list[int]],
        finishes: dict[str, FinishReason] | None = None,
        version: int = 0,
        logprobs: list[float] | None = None,
        behaviour: list[float] | None = None,
    ) -> None:
        """The engine's next step; its logprobs are those of the tokens unless they are given."""
        tokens = [token for row in rows.values() for token in row]
        deltas = Deltas(
            rids=list(rows),
            attempts=[(1, 1)] * len(rows),
            seqs=[0] * len(rows),
            counts=[len(row) for row in rows.values()],
            tokens=np.array(tokens, np.int32).tobytes(),
            logprobs=np.array(
                [-float(token) for token in tokens] if logprobs is None else logprobs, np.float32
            ).tobytes(),
            behaviour_logprobs=np.array(behaviour or [], np.float32).tobytes(),
            versions=[version] * len(rows),
            finishes=[(list(rows).index(rid), why) for rid, why in (finishes or {}).items()],
        )
        self.steps += 1
        self.host(Entry("deltas", body=pack(deltas)))

    def host_ends(self, kind: str, rid: str, body: object) -> None:
        packed = pack(body)  # type: ignore[arg-type] - every body is a struct
        self.host(Entry(kind, rid, (1, 1), body=packed))
