"""Deltas between versions that are kept: made once, when somebody asks, and held for a while.

Pure; the bytes are the shell's. Spec: docs/protocol.md, "Deltas".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import DeltaPart, Offer, PullChunk, WeightDelta
from rolloutbus.trainer_adapter.store import problems
from rolloutbus.trainer_adapter.store.effects import (
    ForgetDelta,
    MakeDelta,
    RemoveFiles,
    SendDeltaChunk,
    StoreAnswer,
    StoreEffect,
    WriteFiles,
)
from rolloutbus.trainer_adapter.store.versions import Asker, DeltaKey, StoredVersion, VersionKey

BEING_WRITTEN = Offer("disk", at="")
"""What a manifest says until the files are there."""


class DiskCopies:
    """Writes go one after another.

    Of the versions of a policy that wait, only the newest is written, so that a slow disk holds
    back neither the trainer nor shared memory.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._writing: StoredVersion | None = None
        self._waiting: dict[str, StoredVersion] = {}
        self._n_failed: dict[str, int] = {}
        """By policy: writes that failed since the last one that did not."""

    @property
    def n_failed(self) -> int:
        """Versions that could not be written, since one of their policy was."""
        return sum(self._n_failed.values())

    def sealed(self, stored: StoredVersion) -> list[StoreEffect]:
        """Queues a sealed version to be written to files."""
        if not self._is_on:
            return []
        stored.offers.append(BEING_WRITTEN)
        stored.n_readers += 1
        skipped = self._waiting.pop(stored.policy, None)
        if skipped is not None:
            skipped.n_readers -= 1
            skipped.offers.remove(BEING_WRITTEN)
        self._waiting[stored.policy] = stored
        return self._next()

    def written(self, at: str) -> list[StoreEffect]:
        """Records where the files are, below the root; an empty path: they could not be written."""
        stored, self._writing = self._writing, None
        assert stored is not None
        stored.n_readers -= 1
        stored.offers.remove(BEING_WRITTEN)
        if at:
            stored.offers.append(Offer("disk", at=at))
            self._n_failed.pop(stored.policy, None)
        else:
            self._n_failed[stored.policy] = self._n_failed.get(stored.policy, 0) + 1
        return self._next()

    def version_gone(self, version: VersionKey) -> list[StoreEffect]:
        """Its files are not needed any more."""
        return [RemoveFiles(version)] if self._is_on else []

    def _next(self) -> list[StoreEffect]:
        if self._writing is not None or not self._waiting:
            return []
        policy = next(iter(self._waiting))
        self._writing = stored = self._waiting.pop(policy)
        return [WriteFiles(stored.key, stored.segment, stored.tensors)]


MAX_IN_THE_MAKING = 2
"""Each keeps a core busy, and takes memory that grows to at most the size of its version."""
IDLE_S = 30.0
"""A delta that was not asked for so long is forgotten."""


@dataclass(slots=True)
class _MadeDelta:
    versions: tuple[StoredVersion, StoredVersion]
    used_at: float
    askers: list[Asker] = field(default_factory=list[Asker])
    """Senders that wait until the delta is made."""
    is_made: bool = False
    answer: WeightDelta | None = None
    """None once it is made: it would be no smaller than the version."""

    @property
    def size_bytes(self) -> int:
        """Of what the shell holds."""
        return self.answer.size_bytes if self.answer is not None else 0


class DeltaTable:
    """Which deltas there are; `now` is in seconds.

    Those that are made have together no more bytes than one version.
    """

    def __init__(self) -> None:
        self._by_key: dict[DeltaKey, _MadeDelta] = {}

    def known(self, key: DeltaKey) -> bool:
        """Whether it is made or being made."""
        return key in self._by_key

    def ask(self, asker: Asker, key: DeltaKey, now: float) -> list[StoreEffect]:
        """The parts of a known delta, now or when it is made."""
        made = self._by_key[key]
        made.used_at = now
        if made.is_made:
            return [_answer(asker, key, made)]
        made.askers.append(asker)
        return []

    def make(
        self, asker: Asker, stored: StoredVersion, base: StoredVersion, now: float
    ) -> list[StoreEffect]:
        """Starts a delta between two sealed versions."""
        key = (stored.policy, stored.number, base.number)
        if len([each for each in self._by_key.values() if not each.is_made]) >= MAX_IN_THE_MAKING:
            message = "other deltas are being made"
            busy = Problem("busy", message, "not_started", retry_after_ms=1000)
            return [StoreAnswer(asker, "failed", busy)]
        self._by_key[key] = _MadeDelta((stored, base), now, [asker])
        for each in (stored, base):
            each.n_readers += 1
        return [MakeDelta(key, base.segment, base.tensors, stored.segment, stored.tensors)]

    def made(
        self, key: DeltaKey, parts: Sequence[DeltaPart] | None, size_bytes: int, now: float
    ) -> list[StoreEffect]:
        """It is there; `parts` is None if it would be no smaller than the version."""
        made = self._by_key[key]
        for each in made.versions:
            each.n_readers -= 1
        made.used_at, made.is_made = now, True
        if parts is not None:
            made.answer = WeightDelta(*key, size_bytes, list(parts))
        askers, made.askers = made.askers, []
        answers = [_answer(each, key, made) for each in askers]
        return [*self._make_room(key, made.versions[0].size_bytes), *answers]

    def chunk(self, asker: Asker, ask: PullChunk, now: float) -> list[StoreEffect]:
        """Bytes of a delta."""
        key = (ask.policy, ask.version, ask.base)
        made = self._by_key.get(key)
        if made is None or made.answer is None:
            return [StoreAnswer(asker, "failed", problems.unavailable(ask.policy, ask.version))]
        problem = problems.bad_range(made.answer.size_bytes, ask.offset, ask.size_bytes)
        if problem is not None:
            return [StoreAnswer(asker, "failed", problem)]
        made.used_at = now
        return [SendDeltaChunk(asker, key, ask.offset, ask.size_bytes)]

    def tick(self, now: float) -> list[StoreEffect]:
        """Forget deltas that have been idle for long."""
        idle = [k for k, made in self._by_key.items() if now - made.used_at > IDLE_S]
        return self._forget(idle)

    def version_gone(self, version: VersionKey) -> list[StoreEffect]:
        """No worker can be brought to this version any more."""
        return self._forget([key for key in self._by_key if key[:2] == version])

    def _make_room(self, new: DeltaKey, limit_bytes: int) -> list[StoreEffect]:
        """Forget those that have been idle longest, for a new one."""
        effects: list[StoreEffect] = []
        held = {key: made for key, made in self._by_key.items() if made.size_bytes}
        by_use = iter(sorted(held.keys() - {new}, key=lambda key: held[key].used_at))
        while sum(each.size_bytes for each in held.values()) > limit_bytes:
            oldest = next(by_use)
            del held[oldest]
            effects += self._forget([oldest])
        return effects

    def _forget(self, keys: list[DeltaKey]) -> list[StoreEffect]:
        gone = [key for key in keys if self._by_key[key].is_made]
        for key in gone:
            del self._by_key[key]
        return list[StoreEffect](ForgetDelta(key) for key in gone)


def _answer(asker: Asker, key: DeltaKey, made: _MadeDelta) -> StoreAnswer:
    if made.answer is None:
        return StoreAnswer(asker, "failed", problems.no_delta(*key[1:]))
    return StoreAnswer(asker, "delta", made.answer)
