"""A client core on a bench: the test plays router and workers, and turns the clock by hand."""

import random
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import xxhash

from rolloutbus.bus.actor.effects import Connect, Send
from rolloutbus.bus.actor.loop import ManualClock
from rolloutbus.bus.wire.codec import decode_batch, encode_batch, pack, unpack
from rolloutbus.bus.wire.entry import NO_ATTEMPT, NO_BODY, Attempt, Entry, Placement
from rolloutbus.bus.wire.messages.control import FleetOutcome, WorkerOutcome
from rolloutbus.bus.wire.messages.endings import Accepted, Ack, Lost, Problem
from rolloutbus.bus.wire.messages.generation import (
    Deltas,
    Generate,
    Generated,
    Idle,
    SamplingParams,
)
from rolloutbus.bus.wire.messages.membership import Lease, Member, Welcome
from rolloutbus.trainer_adapter.client.core.core import ClientCore
from rolloutbus.trainer_adapter.client.core.effects import Complete, Deliver, Effect, Outcome
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.results import Delta, Rollout
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings

T = TypeVar("T")
BOOT = "0123456789abcdef0123456789abcdef"


def ints(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def logprobs_of(*tokens: int) -> bytes:
    """A logprob that shows which token it belongs to."""
    return np.array([-token / 100 for token in tokens], "<f4").tobytes()


def generated(
    *tokens: int, versions: list[tuple[int, int]] | None = None, n_resumed: int = 0
) -> Generated:
    raw = ints(*tokens)
    return Generated(
        tokens=raw,
        logprobs=logprobs_of(*tokens),
        versions=[(0, len(tokens))] if versions is None else versions,
        finish_reason="length",
        digest=xxhash.xxh3_64_intdigest(raw),
        n_prompt_tokens=3,
        n_resumed=n_resumed,
    )


def problem(code: str, retry_after_ms: int = 0) -> Problem:
    return Problem(code, "a test says so", "not_started", retry_after_ms=retry_after_ms)


class Wire:
    """The core, and everything it said. What is sent crosses the codec."""

    def __init__(self, seed: int = 0) -> None:
        self.clock = ManualClock()
        self.settings = ClientSettings(name="c", router="ipc:///nowhere")
        self.core = ClientCore(self.settings, BOOT, random.Random(seed))
        self.sent: list[Entry] = []
        self.effects: list[Effect] = []
        self.outcomes: dict[str, Outcome] = {}
        self.deltas: list[Delta] = []
        self.n_connects = 0
        self.router_answers_heartbeats = True
        self.apply(self.core.start(self.clock.now()))

    def apply(self, effects: list[Effect]) -> None:
        self.effects += effects
        for effect in effects:
            match effect:
                case Send(_, entry):
                    self.sent += decode_batch(encode_batch([entry]))
                case Complete(rid, outcome):
                    assert rid not in self.outcomes, "a request must end exactly once"
                    self.outcomes[rid] = outcome
                case Deliver(_, delta):
                    self.deltas.append(delta)
                case Connect():
                    self.n_connects += 1
                case _:
                    pass

    def say(self, kind: str, body: msgspec.Struct | None = None, **header: Any) -> None:  # noqa: ANN401 - fields of Entry
        """The router sends one entry."""
        raw = NO_BODY if body is None else pack(body)
        entries = decode_batch(encode_batch([Entry(kind, body=raw, **header)]))
        self.apply(self.core.receive(entries, self.clock.now()))

    def publish(self, kind: str, body: msgspec.Struct, worker: str = "w0") -> None:
        """A worker publishes one entry."""
        entry = Entry(kind, epoch="b.1", route=worker, body=pack(body))
        entries = decode_batch(encode_batch([entry]))
        self.apply(self.core.receive_stream(entries, self.clock.now()))

    def pass_time(self, seconds: float) -> None:
        """In steps of 50 ms, with the router answering heartbeats."""
        for _ in range(round(seconds / 0.05)):
            self.clock.advance(0.05)
            n_sent = len(self.sent)
            self.apply(self.core.tick(self.clock.now()))
            if self.router_answers_heartbeats:
                for entry in self.sent[n_sent:]:
                    if entry.kind == "client_beat":
                        self.say("lease", Lease(1, "r1", 1))

    def take(self, kind: str) -> list[Entry]:
        """What was sent of this kind since it was last taken."""
        found = [entry for entry in self.sent if entry.kind == kind]
        self.sent = [entry for entry in self.sent if entry.kind != kind]
        return found

    def bodies(self, kind: str, expected: type[T]) -> list[T]:
        found = [unpack(entry) for entry in self.take(kind)]
        assert all(isinstance(body, expected) for body in found)
        return cast("list[T]", found)

    def acked(self) -> list[tuple[str, str, Attempt]]:
        """(route, rid, attempt) of every acknowledgement."""
        return [
            (entry.route, rid, attempt)
            for entry in self.take("ack")
            for rid, attempt in cast("Ack", unpack(entry)).items
        ]

    def rollout(self, rid: str) -> Rollout:
        outcome = self.outcomes[rid]
        assert isinstance(outcome, Rollout), outcome
        return outcome


class Bench(Wire):
    """What router and workers may say. Worker `w0` unless told otherwise."""

    def welcome(self, *, epoch: int = 1, instance: str = "r1") -> None:
        member = Member("w0", "b.1", "ipc:///w0", "live", 0, "default")
        self.say("welcome", Welcome(epoch, instance, 1, [member]))

    def generate(
        self,
        *,
        deadline_s: float = 60.0,
        stream: bool = False,
        lora: str = "",
        **ask: Any,  # noqa: ANN401 - fields of Ask
    ) -> str:
        sampling = SamplingParams(max_new_tokens=8)
        body = Generate(prompt=ints(1, 2, 3), sampling=sampling, stream=stream, lora=lora)
        full = Ask("generate", body, place=Placement("default"), **ask)
        rid, effects = self.core.submit(full, deadline_s, self.clock.now())
        self.apply(effects)
        return rid

    def command(
        self, kind: str, body: msgspec.Struct, *, route: str = "", deadline_s: float = 5.0
    ) -> str:
        rid, effects = self.core.submit(Ask(kind, body, route), deadline_s, self.clock.now())
        self.apply(effects)
        return rid

    def abort(self, *rids: str) -> int:
        n_aborted, effects = self.core.abort(rids or None, self.clock.now())
        self.apply(effects)
        return n_aborted

    def accept(self, rid: str, attempt: Attempt, worker: str = "w0") -> None:
        self.say("accepted", Accepted([(rid, attempt)]), route=worker)

    def row(
        self,
        rid: str,
        attempt: Attempt,
        seq: int,
        *tokens: int,
        version: int = 0,
        worker: str = "w0",
        is_last: bool = False,
    ) -> None:
        """A worker publishes one row."""
        body = Deltas(
            rids=[rid],
            attempts=[attempt],
            seqs=[seq],
            counts=[len(tokens)],
            tokens=ints(*tokens),
            logprobs=logprobs_of(*tokens),
            versions=[version],
            finishes=[(0, "length")] if is_last else [],
        )
        self.publish("deltas", body, worker)

    def idle(self, rid: str, attempt: Attempt, n_tokens: int) -> None:
        self.publish("idle", Idle([rid], [attempt], [n_tokens]))

    def lose(self, rid: str, attempt: Attempt, reason: str = "lease_expired") -> None:
        self.say("lost", Lost([(rid, attempt)], "w0", reason))

    def finish(
        self,
        rid: str,
        attempt: Attempt,
        result: Generated,
        *,
        worker: str = "w0",
        kind: str = "finished",
    ) -> None:
        self.say(kind, result, rid=rid, attempt=attempt, route=worker)

    def refuse(self, rid: str, why: Problem, attempt: Attempt = NO_ATTEMPT) -> None:
        self.say("refused", why, rid=rid, attempt=attempt, route="w0" if attempt[1] else "")

    def answer_fleet(self, rid: str, kind: str, body: msgspec.Struct, *silent: str) -> None:
        outcome = FleetOutcome([WorkerOutcome("w0", kind, pack(body))], list(silent))
        self.say("finished", outcome, rid=rid)
