"""Decides what a worker answers to other workers that ask for versions that it holds or receives.

A question that cannot be answered yet waits for a moment, so that a version flows on while it
comes in. Spec: docs/protocol.md, "Weights".
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from rolloutbus.bus.wire.entry import Peer
from rolloutbus.bus.wire.limits import CHUNK_BYTES
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import Manifest, PullChunk, PullManifest
from rolloutbus.engine_worker.weights.arrival import Layout

PARK_S = 4.0
"""A question waits so long for its answer: less than the 5 s after which the asker gives up."""
MAX_PARKED = 1024
"""Questions that wait at once."""
BUSY_RETRY_MS = 500

VersionKey = tuple[str, int]
"""(policy, version)."""
Question = PullManifest | PullChunk


class Asker(NamedTuple):
    """The peer that asked, and the rid of its question."""

    peer: Peer
    rid: str


class RelayAnswer(NamedTuple):
    """Send an answer to the asker."""

    asker: Asker
    kind: Literal["manifest", "failed"]
    body: msgspec.Struct


class SendChunk(NamedTuple):
    """Answer with these bytes of a version."""

    asker: Asker
    key: VersionKey
    offset: int
    size_bytes: int


RelayEffect = RelayAnswer | SendChunk


@dataclass(slots=True)
class _Held:
    manifest: Manifest
    layout: Layout
    is_right: list[bool]

    def has(self, ask: PullChunk) -> bool:
        """Whether all tensors that lie in these bytes have been found right."""
        touched = self.layout.touched(ask.offset, ask.size_bytes)
        return all(self.is_right[index] for index, _ in touched)


class _Parked(NamedTuple):
    asker: Asker
    question: Question
    until: float


class RelayCore:
    """Pure; every method returns what the shell must do, in order. `now` is in seconds."""

    def __init__(self) -> None:
        self._held: dict[VersionKey, _Held] = {}
        self._parked: dict[VersionKey, list[_Parked]] = {}
        self._newest: dict[str, int] = {}
        """Of each policy that is served here: the newest version that has come."""

    @property
    def n_parked(self) -> int:
        """Questions that wait."""
        return sum(map(len, self._parked.values()))

    def begin(self, manifest: Manifest) -> list[RelayEffect]:
        """This version is arriving; nothing of it is known to be right yet."""
        layout = Layout(manifest.tensors)
        is_right = [each.size_bytes == 0 for each in manifest.tensors]
        self._held[_key(manifest)] = _Held(manifest, layout, is_right)
        self._note(_key(manifest))
        return self._look_again(_key(manifest))

    def proven(self, key: VersionKey, tensors: Iterable[int]) -> list[RelayEffect]:
        """These tensors, by index, have the right digests."""
        held = self._held.get(key)
        if held is None:
            return []
        for index in tensors:
            held.is_right[index] = True
        return self._look_again(key)

    def end(self, key: VersionKey) -> list[RelayEffect]:
        """Its bytes are not here (any more), and it is not about to come."""
        self._held.pop(key, None)
        self._note(key)
        parked = self._parked.pop(key, [])
        return [_failed(each.asker, _unavailable(key)) for each in parked]

    def ask(self, asker: Asker, question: Question, now: float) -> list[RelayEffect]:
        """A question; the asker gets exactly one answer, now or within PARK_S."""
        key = _key(question)
        answer = self._answer(asker, question)
        if answer is not None:
            return [answer]
        if key not in self._held and key[1] <= self._newest.get(key[0], 0):
            return [_failed(asker, _unavailable(key))]
        if self.n_parked >= MAX_PARKED:
            return [_failed(asker, _busy(key, BUSY_RETRY_MS))]
        self._parked.setdefault(key, []).append(_Parked(asker, question, now + PARK_S))
        return []

    def tick(self, now: float) -> list[RelayEffect]:
        """Answer the questions that have waited for long enough."""
        effects: list[RelayEffect] = []
        for key, parked in list(self._parked.items()):
            problem = _busy(key) if key in self._held else _unavailable(key)
            effects += [_failed(each.asker, problem) for each in parked if each.until <= now]
            self._keep(key, [each for each in parked if each.until > now])
        return effects

    def _note(self, key: VersionKey) -> None:
        policy, version = key
        self._newest[policy] = max(version, self._newest.get(policy, 0))

    def _look_again(self, key: VersionKey) -> list[RelayEffect]:
        effects: list[RelayEffect] = []
        waiting: list[_Parked] = []
        for each in self._parked.get(key, ()):
            answer = self._answer(each.asker, each.question)
            if answer is None:
                waiting.append(each)
            else:
                effects.append(answer)
        self._keep(key, waiting)
        return effects

    def _keep(self, key: VersionKey, parked: list[_Parked]) -> None:
        if parked:
            self._parked[key] = parked
        else:
            self._parked.pop(key, None)

    def _answer(self, asker: Asker, question: Question) -> RelayEffect | None:
        """None: not yet."""
        key = _key(question)
        held = self._held.get(key)
        if held is None:
            return None
        if isinstance(question, PullManifest):
            return RelayAnswer(asker, "manifest", held.manifest)
        problem = _bad_chunk(question, held.manifest.size_bytes)
        if problem is not None:
            return _failed(asker, problem)
        if not held.has(question):
            return None
        return SendChunk(asker, key, question.offset, question.size_bytes)


def _key(about: Manifest | Question) -> VersionKey:
    return about.policy, about.version


def _bad_chunk(ask: PullChunk, size_bytes: int) -> Problem | None:
    if ask.base:
        message = "A worker serves whole versions, no deltas."
        return Problem("unsupported", message, "not_started", field="base")
    if not 0 < ask.size_bytes <= CHUNK_BYTES:
        message = f"A chunk has 1 to {CHUNK_BYTES} bytes, not {ask.size_bytes}."
        return Problem("bad_request", message, "not_started", field="size_bytes")
    if ask.offset + ask.size_bytes > size_bytes:
        message = f"{ask.offset}+{ask.size_bytes} is outside of {size_bytes} bytes."
        return Problem("bad_request", message, "not_started", field="offset")
    return None


def _failed(asker: Asker, problem: Problem) -> RelayAnswer:
    return RelayAnswer(asker, "failed", problem)


def _unavailable(key: VersionKey) -> Problem:
    message = f"Version {key[1]} of policy {key[0][:64]!r} is not held here."
    return Problem("version_unavailable", message, "not_started", field="version")


def _busy(key: VersionKey, retry_after_ms: int = 0) -> Problem:
    message = f"These bytes of version {key[1]} have not arrived here yet."
    return Problem("busy", message, "not_started", retry_after_ms=retry_after_ms)
