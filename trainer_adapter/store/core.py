"""The store's decisions: which versions may be written, pulled, committed, retired.

Bytes, files and sockets are the shell's; see `trainer_adapter.store.effects`.
Spec: docs/protocol.md, "Weights".
"""

from collections.abc import Mapping, Sequence

import msgspec

from rolloutbus.bus.weights.manifest import check_tensors
from rolloutbus.bus.wire.messages.endings import Done, Problem, bad_request
from rolloutbus.bus.wire.messages.membership import Intent
from rolloutbus.bus.wire.messages.weights import (
    DeltaPart,
    Manifest,
    PullChunk,
    PullDelta,
    PullManifest,
    PushChunk,
    RecordCommit,
    Reserved,
    ReserveVersion,
    RestoreVersion,
    SealVersion,
    Settled,
    SettleVersion,
    Tensor,
    VerifyTensors,
    VersionRestored,
)
from rolloutbus.trainer_adapter.store import problems
from rolloutbus.trainer_adapter.store.derived import DeltaTable, DiskCopies
from rolloutbus.trainer_adapter.store.effects import (
    Allocate,
    AnswerKind,
    Freeze,
    MakeAhead,
    Persist,
    Release,
    SendSegmentChunk,
    StoreAnswer,
    StoreEffect,
    Verify,
    VerifyEarly,
    WriteChunk,
)
from rolloutbus.trainer_adapter.store.settings import StoreSettings
from rolloutbus.trainer_adapter.store.versions import (
    Asker,
    Assigned,
    CommitRecord,
    DeltaKey,
    Intended,
    Retired,
    StoredVersion,
    VersionKey,
    VersionTable,
)

MemberCommand = (
    ReserveVersion | VerifyTensors | SealVersion | RestoreVersion | SettleVersion | RecordCommit
)
"""Comes through the router."""
BulkRequest = PullManifest | PullDelta | PullChunk | PushChunk
"""Comes over the bulk socket."""
StoreCommand = MemberCommand | BulkRequest


class StoreCore:
    """Pure; every method returns what the shell must do, in order. `now` is in seconds."""

    def __init__(self, settings: StoreSettings, host: str, table: VersionTable) -> None:
        self._settings = settings
        self._host = host
        self._table = table
        self._deltas = DeltaTable()
        self._copies = DiskCopies(is_on=bool(settings.disk))

    @property
    def n_unwritten(self) -> int:
        """Versions that could not be written to files, since one of their policy was."""
        return self._copies.n_failed

    def heed(self, intent: Intent) -> list[StoreEffect]:
        """Records the intended state of the fleet for the next router."""
        self._table.intent = intent
        return [Persist(Intended(intent))]

    def opened(self) -> list[StoreEffect]:
        """Once, at the start: versions in use that were not yet written to files."""
        effects: list[StoreEffect] = []
        for stored in self._table.pullable():
            if self._table.committed.get(stored.policy) == stored.number and not stored.offers:
                effects += self._copies.sealed(stored)
        return effects

    def handle(self, asker: Asker, command: StoreCommand, now: float) -> list[StoreEffect]:
        """A command or a bulk request; the asker gets exactly one answer, now or later."""
        match command:
            case ReserveVersion():
                return self._reserve(asker, command, now)
            case VerifyTensors():
                return self._verify_early(asker, command, now)
            case SealVersion():
                return self._seal(asker, command, now)
            case RestoreVersion():
                return self._restore(asker, command, now)
            case SettleVersion():
                return self._settle(asker, command, now)
            case RecordCommit():
                return self._commit(asker, command, now)
            case PullManifest():
                return self._pull_manifest(asker, command)
            case PullDelta():
                return self._pull_delta(asker, command, now)
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
        return _answer_all(stored, "finished", body) + self._settle_all(stored, now)

    def allocation_failed(self, key: VersionKey, reason: str) -> list[StoreEffect]:
        """There is no room for it."""
        stored = self._table.by_key.pop(key)
        stored.on("give_up")
        full = problems.store_full(reason, self._reserved_bytes())
        settled = self._settled(stored.settlers, is_committed=False)
        return _answer_all(stored, "failed", full) + settled

    def verified(self, key: VersionKey, mismatch: str, now: float) -> list[StoreEffect]:
        """The digests are right (`mismatch` is empty), or this tensor has other bytes."""
        stored = self._table.by_key[key]
        stored.found.clear()
        if mismatch:
            stored.on("mismatch")
            stored.used_at = now
            wrong = _answer_all(stored, "failed", problems.wrong_bytes(mismatch))
            return wrong + self._settle_all(stored, now)
        stored.on("verified")
        return [
            Persist(stored.sealed()),
            Freeze(stored.segment),
            *_answer_all(stored, "finished", Done()),
            *self._copies.sealed(stored),
            *self._settle_all(stored, now),
            *self._retire_outdated(stored.policy, now),
        ]

    def verified_early(
        self, key: VersionKey, tensors: Mapping[int, Tensor], *, is_right: bool
    ) -> list[StoreEffect]:
        """Some tensors of a version that is being written have been read: all right, or not."""
        stored = self._table.by_key.get(key)
        if stored is None:
            return []
        stored.is_read_early = False
        if is_right and not stored.is_pushed:
            stored.found |= {number: tensor.digest for number, tensor in tensors.items()}
        if stored.state == "verifying":
            return [Verify(key, stored.segment, stored.to_verify())]
        return _read_early(stored)

    def delta_made(
        self, key: DeltaKey, parts: Sequence[DeltaPart] | None, size_bytes: int, now: float
    ) -> list[StoreEffect]:
        """The versions were compared; `parts` is None if a delta would be no smaller."""
        return self._deltas.made(key, parts, size_bytes, now)

    def files_written(self, at: str) -> list[StoreEffect]:
        """A version is in files at this place below the root; empty: it could not be written."""
        return self._copies.written(at)

    def tick(self, now: float) -> list[StoreEffect]:
        """Give up reservations that are not used; retire what was kept only for its pullers."""
        effects = self._deltas.tick(now)
        for stored in list(self._table.by_key.values()):
            has_lapsed = now - stored.used_at > self._settings.reservation_s
            if stored.state == "reserved" and has_lapsed:
                stored.on("give_up")
                del self._table.by_key[stored.key]
                # Its trainer may be alive, late, and still writing.
                effects.append(Release(stored.segment, is_reusable=False))
            elif stored.state == "withdrawn":
                effects += self._drop_withdrawn(stored, now)
        for policy in self._table.assigned:
            effects += self._retire_outdated(policy, now)
        return effects

    def _reserve(self, asker: Asker, ask: ReserveVersion, now: float) -> list[StoreEffect]:
        problem = problems.bad_policy(ask.policy) or check_tensors(ask.tensors)
        last = max(self._table.assigned.get(ask.policy, 0), ask.above)
        if problem is None and 0 < ask.version <= last:
            problem = problems.number_taken(ask.policy, ask.version, last)
        if problem is None and not ask.version:
            problem = problems.no_number_after(ask.policy, last)
        if problem is not None:
            return [StoreAnswer(asker, "refused", problem)]
        stored = self._table.assign(ask.policy, ask.tensors, ask.version or last + 1)
        stored.used_at = now
        stored.askers.append(asker)
        return [Persist(Assigned(*stored.key)), Allocate(stored.key, stored.size_bytes)]

    def _verify_early(self, asker: Asker, ask: VerifyTensors, now: float) -> list[StoreEffect]:
        """Answers at once: what is found out concerns the seal alone."""
        stored = self._table.by_key.get((ask.policy, ask.version))
        if stored is None or stored.state != "reserved":
            return [StoreAnswer(asker, "refused", problems.unavailable(ask.policy, ask.version))]
        if len(ask.digests) != len(ask.numbers):
            message = f"{len(ask.digests)} digests for {len(ask.numbers)} tensors"
            return [StoreAnswer(asker, "refused", bad_request("digests", message))]
        n_tensors = len(stored.tensors)
        if any(number >= n_tensors for number in ask.numbers):
            message = f"there is no tensor {max(ask.numbers)}: the version has {n_tensors}"
            return [StoreAnswer(asker, "refused", bad_request("numbers", message))]
        stored.used_at = now
        if not stored.is_pushed:
            stored.told |= dict(zip(ask.numbers, ask.digests, strict=True))
        return [StoreAnswer(asker, "finished", Done()), *_read_early(stored)]

    def _seal(self, asker: Asker, ask: SealVersion, now: float) -> list[StoreEffect]:
        stored = self._table.by_key.get((ask.policy, ask.version))
        if stored is None or stored.state in {"reserving", "withdrawn"}:
            return [StoreAnswer(asker, "refused", problems.unavailable(ask.policy, ask.version))]
        if len(ask.digests) != len(stored.tensors):
            message = f"{len(ask.digests)} digests for {len(stored.tensors)} tensors"
            return [StoreAnswer(asker, "refused", bad_request("digests", message))]
        if stored.state == "reserved":
            stored.on("seal")
            stored.used_at = now
            stored.take_digests(ask.digests)
            stored.offers = list(ask.offers)
            stored.may_hold_zeros = ask.allow_zeros
            stored.askers.append(asker)
            stored.told.clear()
            if stored.is_read_early:
                return []  # its end begins it
            return [Verify(stored.key, stored.segment, stored.to_verify())]
        if ask.digests != [each.digest for each in stored.tensors]:
            message = "the version was sealed with other digests"
            problem = Problem("digest_mismatch", message, "failed", field="digests")
            return [StoreAnswer(asker, "failed", problem)]
        if stored.state == "verifying":
            stored.askers.append(asker)
            return []
        return [StoreAnswer(asker, "finished", Done(note="sealed before"))]

    def _restore(self, asker: Asker, ask: RestoreVersion, now: float) -> list[StoreEffect]:
        old = self._pullable(ask.policy, ask.version)
        if old is None:
            mine = (each for each in self._table.pullable() if each.policy == ask.policy)
            kept = sorted(each.number for each in mine)
            return [StoreAnswer(asker, "failed", problems.not_kept(ask.policy, ask.version, kept))]
        last = max(self._table.assigned[old.policy], ask.above)
        problem = problems.no_number_after(old.policy, last)
        if problem is not None:
            return [StoreAnswer(asker, "refused", problem)]
        stored = self._table.assign(old.policy, old.tensors, last + 1)
        stored.on("restored")
        stored.segment = old.segment
        stored.may_hold_zeros = old.allows_zeros
        return [
            Persist(Assigned(*stored.key)),
            Persist(stored.sealed()),
            StoreAnswer(asker, "finished", VersionRestored(stored.number)),
            *self._copies.sealed(stored),
            *self._retire_outdated(stored.policy, now),
        ]

    def _settle(self, asker: Asker, ask: SettleVersion, now: float) -> list[StoreEffect]:
        """Decide against a version, unless it is committed; the answer is durable."""
        stored = self._table.by_key.get((ask.policy, ask.version))
        if stored is not None:
            stored.settlers.append(asker)
            return self._settle_all(stored, now)
        was_committed = self._table.was_committed(ask.policy, ask.version)
        if was_committed is None or ask.version > self._table.assigned.get(ask.policy, 0):
            return [StoreAnswer(asker, "refused", problems.unavailable(ask.policy, ask.version))]
        return self._settled([asker], is_committed=was_committed)

    def _settle_all(self, stored: StoredVersion, now: float) -> list[StoreEffect]:
        """Answers all settle requests of a version, unless a step of it still has to end first."""
        if not stored.settlers or stored.state in {"reserving", "verifying"}:
            return []
        settlers, stored.settlers = stored.settlers, []
        if stored.state == "committed":
            # It may be on its way to the disk: what is written after it is answered after it.
            last = self._table.assigned[stored.policy]
            return [
                Persist(Assigned(stored.policy, last)),
                *self._settled(settlers, is_committed=True),
            ]
        effects: list[StoreEffect] = []
        if stored.state == "reserved":
            stored.on("give_up")
            del self._table.by_key[stored.key]
            # Who asks may not be who writes: a frozen trainer that was taken for dead wakes up.
            effects.append(Release(stored.segment, is_reusable=False))
        elif stored.state == "sealed":
            stored.on("withdraw")
            effects += [Persist(Retired(*stored.key)), *self._drop_withdrawn(stored, now)]
        return effects + self._settled(settlers, is_committed=False)

    def _settled(self, settlers: Sequence[Asker], *, is_committed: bool) -> list[StoreEffect]:
        return list[StoreEffect](
            StoreAnswer(each, "finished", Settled(is_committed)) for each in settlers
        )

    def _drop_withdrawn(self, stored: StoredVersion, now: float) -> list[StoreEffect]:
        """Gives the version's bytes back as soon as no reader uses them."""
        return [] if stored.is_in_use(now) else self._drop(stored)

    def _drop(self, stored: StoredVersion) -> list[StoreEffect]:
        """Removes a version after its end has been recorded."""
        stored.on("outdated")
        del self._table.by_key[stored.key]
        effects: list[StoreEffect] = []
        if not self._table.uses(stored.segment):
            effects.append(Release(stored.segment, is_reusable=True))
        effects += self._deltas.version_gone(stored.key)
        return effects + self._copies.version_gone(stored.key)

    def _reserved_bytes(self) -> int:
        """Of versions that are being written."""
        reserved = {"reserving", "reserved", "verifying"}
        versions = self._table.by_key.values()
        return sum(each.size_bytes for each in versions if each.state in reserved)

    def _commit(self, asker: Asker, ask: RecordCommit, now: float) -> list[StoreEffect]:
        written = self._record_commit(ask)
        if isinstance(written, Problem):
            return [StoreAnswer(asker, "failed", written)]
        effects: list[StoreEffect] = [Persist(each) for each in written]
        effects.append(StoreAnswer(asker, "finished", Done()))
        effects += self._retire_outdated(ask.policy, now)
        stored = self._pullable(ask.policy, ask.version)
        if written and stored is not None and not ask.is_adapter:
            effects.append(MakeAhead(stored.size_bytes))
        return effects

    def _record_commit(self, ask: RecordCommit) -> list[CommitRecord] | Problem:
        """Change the table; what must be written down before it is answered, or why not."""
        table, policy, version = self._table, ask.policy, ask.version
        stored = self._pullable(policy, version)
        last = table.committed.get(policy, 0)
        if version < last and not ask.is_adapter:
            return problems.older(policy, version, last)
        if stored is None and (version or not ask.is_adapter):
            return problems.unavailable(policy, version)
        if ask.is_adapter:
            if table.adapters.get(policy, 0) == version:
                return []
            if stored is not None:
                stored.on("commit")
                stored.is_adapter = True
            written = CommitRecord(policy, version, is_adapter=True)
            table.note_adapter(written)
            return [written]
        assert stored is not None
        are_waves_through = not ask.floor and policy in table.waves
        is_new = stored.state == "sealed"
        stored.on("commit")
        table.committed[policy] = version
        table.note_history(policy, version)
        if not (is_new or are_waves_through):
            return []
        written = CommitRecord(*stored.key, last if ask.floor else 0, ask.floor, tag=ask.tag)
        table.note_waves(written)
        table.note_tag(policy, version, ask.tag)
        return [written]

    def _pull_manifest(self, asker: Asker, ask: PullManifest) -> list[StoreEffect]:
        stored = self._pullable(ask.policy, ask.version)
        if stored is None:
            return [StoreAnswer(asker, "failed", problems.unavailable(ask.policy, ask.version))]
        manifest = Manifest(
            policy=stored.policy,
            version=stored.number,
            host=self._host,
            segment=stored.segment,
            size_bytes=stored.size_bytes,
            tensors=stored.tensors,
            offers=stored.offers,
            allow_zeros=stored.allows_zeros,
        )
        return [StoreAnswer(asker, "manifest", manifest)]

    def _pull_delta(self, asker: Asker, ask: PullDelta, now: float) -> list[StoreEffect]:
        key = (ask.policy, ask.version, ask.base)
        if self._deltas.known(key):
            return self._deltas.ask(asker, key, now)
        stored, base = (self._pullable(ask.policy, each) for each in (ask.version, ask.base))
        if stored is None or base is None or stored is base:
            missing = ask.version if stored is None else ask.base
            return [StoreAnswer(asker, "failed", problems.unavailable(ask.policy, missing))]
        return self._deltas.make(asker, stored, base, now)

    def _pull_chunk(self, asker: Asker, ask: PullChunk, now: float) -> list[StoreEffect]:
        if ask.base:
            return self._deltas.chunk(asker, ask, now)
        stored = self._pullable(ask.policy, ask.version)
        if stored is None:
            return [StoreAnswer(asker, "failed", problems.unavailable(ask.policy, ask.version))]
        problem = problems.bad_range(stored.size_bytes, ask.offset, ask.size_bytes)
        if problem is not None:
            return [StoreAnswer(asker, "failed", problem)]
        stored.pulled_until = now + self._settings.pull_grace_s
        return [SendSegmentChunk(asker, stored.segment, ask.offset, ask.size_bytes)]

    def _push_chunk(self, asker: Asker, ask: PushChunk, now: float) -> list[StoreEffect]:
        stored = self._table.by_key.get((ask.policy, ask.version))
        if stored is None or stored.state != "reserved":
            return [StoreAnswer(asker, "failed", problems.unavailable(ask.policy, ask.version))]
        problem = problems.bad_range(stored.size_bytes, ask.offset, len(ask.content))
        if problem is not None:
            return [StoreAnswer(asker, "failed", problem)]
        stored.used_at = now
        stored.is_pushed = True
        stored.told.clear()
        stored.found.clear()
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
            if stored.is_in_use(now):
                continue
            effects += [Persist(Retired(*stored.key)), *self._drop(stored)]
        return effects


def _read_early(stored: StoredVersion) -> list[StoreEffect]:
    """Begins with what is said to be written, if there is any; one read at a time."""
    if stored.is_read_early or not stored.told:
        return []
    tensors = {
        number: msgspec.structs.replace(stored.tensors[number], digest=digest)
        for number, digest in stored.told.items()
    }
    stored.told.clear()
    stored.is_read_early = True
    return [VerifyEarly(stored.key, stored.segment, tensors)]


def _answer_all(stored: StoredVersion, kind: AnswerKind, body: msgspec.Struct) -> list[StoreEffect]:
    askers, stored.askers = stored.askers, []
    return list[StoreEffect](StoreAnswer(asker, kind, body) for asker in askers)
