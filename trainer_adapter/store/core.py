"""The store's decisions: which versions may be written, pulled, committed, retired.

Bytes, files and sockets are the shell's; see `trainer_adapter.store.effects`.
Spec: docs/protocol.md, "Weights".
"""

import msgspec

from bus.manifest import check_tensors
from bus.messages.endings import Done
from bus.messages.weights import (
    Manifest,
    PullChunk,
    PullManifest,
    PushChunk,
    RecordCommit,
    Reserved,
    ReserveVersion,
    SealVersion,
)
from trainer_adapter.store import problems
from trainer_adapter.store.askers import Asker
from trainer_adapter.store.effects import (
    Allocate,
    Answer,
    AnswerKind,
    Freeze,
    Persist,
    Release,
    SendChunk,
    StoreEffect,
    Verify,
    WriteChunk,
)
from trainer_adapter.store.records import Assigned, Committed, Retired, Sealed
from trainer_adapter.store.settings import StoreSettings
from trainer_adapter.store.versions import StoredVersion, VersionKey, VersionTable

StoreCommand = ReserveVersion | SealVersion | RecordCommit | PullManifest | PullChunk | PushChunk


class StoreCore:
    """Pure; every method returns what the shell must do, in order. `now` is in seconds."""

    def __init__(self, settings: StoreSettings, host: str, table: VersionTable) -> None:
        self._settings = settings
        self._host = host
        self._table = table

    @property
    def committed(self) -> dict[str, int]:
        """Last committed version of each policy."""
        return self._table.committed

    def handle(self, asker: Asker, command: StoreCommand, now: float) -> list[StoreEffect]:
        """A command or a bulk request; the asker gets exactly one answer, now or later."""
        match command:
            case ReserveVersion():
                return self._reserve(asker, command, now)
            case SealVersion():
                return self._seal(asker, command, now)
            case RecordCommit():
                return self._commit(asker, command, now)
            case PullManifest():
                return self._pull_manifest(asker, command)
            case PullChunk():
                return self._pull_chunk(asker, command, now)
            case PushChunk():
                return self._push_chunk(asker, command, now)

    def allocated(self, key: VersionKey, segment: str, now: float) -> list[StoreEffect]:
        """The segment asked for is here."""
        stored = self._table.by_key[key]
        stored.on("allocated")
        stored.segment = segment
        stored.used_at = now
        body = Reserved(
            version=stored.number, host=self._host, segment=segment, size_bytes=stored.size_bytes
        )
        return _answer_all(stored, "finished", body)

    def allocation_failed(self, key: VersionKey, reason: str) -> list[StoreEffect]:
        """There is no room for it."""
        stored = self._table.by_key.pop(key)
        stored.on("give_up")
        return _answer_all(stored, "failed", problems.store_full(reason))

    def verified(self, key: VersionKey, mismatch: str, now: float) -> list[StoreEffect]:
        """The digests are right (`mismatch` is empty), or this tensor has other bytes."""
        stored = self._table.by_key[key]
        if mismatch:
            stored.on("mismatch")
            stored.used_at = now
            return _answer_all(stored, "failed", problems.wrong_bytes(mismatch))
        stored.on("verified")
        return [
            Persist(Sealed(*stored.key, stored.segment, stored.tensors)),
            Freeze(stored.segment),
            *_answer_all(stored, "finished", Done()),
            *self._retire_outdated(stored.policy, now),
        ]

    def tick(self, now: float) -> list[StoreEffect]:
        """Give up reservations that nobody uses; retire what was kept only for its pullers."""
        effects: list[StoreEffect] = []
        for stored in list(self._table.by_key.values()):
            has_lapsed = now - stored.used_at > self._settings.reservation_s
            if stored.state == "reserved" and has_lapsed:
                stored.on("give_up")
                del self._table.by_key[stored.key]
                # Its trainer may be alive, late, and still writing.
                effects.append(Release(stored.segment, is_reusable=False))
        for policy in self._table.assigned:
            effects += self._retire_outdated(policy, now)
        return effects

    def _reserve(self, asker: Asker, ask: ReserveVersion, now: float) -> list[StoreEffect]:
        problem = problems.bad_policy(ask.policy) or check_tensors(ask.tensors)
        if problem is not None:
            return [Answer(asker, "refused", problem)]
        stored = self._table.assign(ask.policy, ask.tensors)
        stored.used_at = now
        stored.askers.append(asker)
        return [Persist(Assigned(*stored.key)), Allocate(stored.key, stored.size_bytes)]

    def _seal(self, asker: Asker, ask: SealVersion, now: float) -> list[StoreEffect]:
        stored = self._table.by_key.get((ask.policy, ask.version))
        if stored is None or stored.state == "reserving":
            return [Answer(asker, "refused", problems.unavailable(ask.policy, ask.version))]
        if len(ask.digests) != len(stored.tensors):
            message = f"{len(ask.digests)} digests for {len(stored.tensors)} tensors"
            return [Answer(asker, "refused", problems.bad_request("digests", message))]
        if stored.state == "reserved":
            stored.on("seal")
            stored.used_at = now
            stored.take_digests(ask.digests)
            stored.askers.append(asker)
            return [Verify(stored.key, stored.segment, stored.tensors)]
        if ask.digests != [each.digest for each in stored.tensors]:
            return [Answer(asker, "failed", problems.other_digests())]
        if stored.state == "verifying":
            stored.askers.append(asker)
            return []
        return [Answer(asker, "finished", Done(note="sealed before"))]

    def _commit(self, asker: Asker, ask: RecordCommit, now: float) -> list[StoreEffect]:
        last = self.committed.get(ask.policy, 0)
        if ask.version < last:
            problem = problems.older(ask.policy, ask.version, last)
            return [Answer(asker, "failed", problem)]
        stored = self._pullable(ask.policy, ask.version)
        if stored is None:
            return [Answer(asker, "failed", problems.unavailable(ask.policy, ask.version))]
        effects: list[StoreEffect] = []
        if stored.state == "sealed":
            effects.append(Persist(Committed(*stored.key)))
        stored.on("commit")
        self.committed[ask.policy] = ask.version
        effects.append(Answer(asker, "finished", Done()))
        return effects + self._retire_outdated(ask.policy, now)

    def _pull_manifest(self, asker: Asker, ask: PullManifest) -> list[StoreEffect]:
        stored = self._pullable(ask.policy, ask.version)
        if stored is None:
            return [Answer(asker, "failed", problems.unavailable(ask.policy, ask.version))]
        manifest = Manifest(
            policy=stored.policy,
            version=stored.number,
            host=self._host,
            segment=stored.segment,
            size_bytes=stored.size_bytes,
            tensors=stored.tensors,
        )
        return [Answer(asker, "manifest", manifest)]

    def _pull_chunk(self, asker: Asker, ask: PullChunk, now: float) -> list[StoreEffect]:
        stored = self._pullable(ask.policy, ask.version)
        if stored is None:
            return [Answer(asker, "failed", problems.unavailable(ask.policy, ask.version))]
        problem = problems.bad_range(stored, ask.offset, ask.size_bytes)
        if problem is not None:
            return [Answer(asker, "failed", problem)]
        stored.pulled_until = now + self._settings.pull_grace_s
        return [SendChunk(asker, stored.segment, ask.offset, ask.size_bytes)]

    def _push_chunk(self, asker: Asker, ask: PushChunk, now: float) -> list[StoreEffect]:
        stored = self._table.by_key.get((ask.policy, ask.version))
        if stored is None or stored.state != "reserved":
            return [Answer(asker, "failed", problems.unavailable(ask.policy, ask.version))]
        problem = problems.bad_range(stored, ask.offset, len(ask.content))
        if problem is not None:
            return [Answer(asker, "failed", problem)]
        stored.used_at = now
        return [WriteChunk(asker, stored.segment, ask.offset, ask.content)]

    def _pullable(self, policy: str, version: int) -> StoredVersion | None:
        stored = self._table.by_key.get((policy, version))
        return stored if stored is not None and stored.is_pullable else None

    def _retire_outdated(self, policy: str, now: float) -> list[StoreEffect]:
        effects: list[StoreEffect] = []
        for stored in self._table.outdated(
            policy,
            keep_committed=self._settings.keep_committed,
            keep_sealed=self._settings.keep_sealed,
        ):
            if stored.pulled_until > now:
                continue
            stored.on("outdated")
            del self._table.by_key[stored.key]
            effects += [
                Persist(Retired(*stored.key)),
                Release(stored.segment, is_reusable=True),
            ]
        return effects


def _answer_all(stored: StoredVersion, kind: AnswerKind, body: msgspec.Struct) -> list[StoreEffect]:
    askers, stored.askers = stored.askers, []
    return list[StoreEffect](Answer(asker, kind, body) for asker in askers)
