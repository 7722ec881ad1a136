"""Which sealed versions are written to files, one at a time, and how that is offered.

Pure; the files are the shell's. Spec: docs/protocol.md, "Transports".
"""

from rolloutbus.bus.wire.messages.weights import Offer
from rolloutbus.trainer_adapter.store.effects import RemoveFiles, StoreEffect, WriteFiles
from rolloutbus.trainer_adapter.store.versions import StoredVersion, VersionKey

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

    def sealed(self, stored: StoredVersion) -> list[StoreEffect]:
        """A version whose bytes will not change any more."""
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
        """The files are at this place below the root; empty: they could not be written."""
        stored, self._writing = self._writing, None
        assert stored is not None
        stored.n_readers -= 1
        stored.offers.remove(BEING_WRITTEN)
        if at:
            stored.offers.append(Offer("disk", at=at))
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
