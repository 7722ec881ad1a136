"""What stands between a weight version and the engine: the bytes, and the ways they come by.

A way (`Fetcher`) brings the bytes of one version where the engine can read them, verified, beside
the weights that it serves with. `engine_worker.weights.receiver` chooses and keeps; the ways know
nothing of one another.
"""

from collections.abc import Mapping
from typing import Protocol

from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.wire.messages.weights import Manifest, PrepareUpdate
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor


class CannotFetch(Exception):
    """This way does not lead to the version; another one may. The text says why."""


class Staged(Protocol):
    """One verified version, held or mapped until `release`."""

    @property
    def manifest(self) -> Manifest:
        """What it holds."""
        ...

    @property
    def transport(self) -> str:
        """The way it came, a name of docs/protocol.md, "Weights"."""
        ...

    @property
    def moved_bytes(self) -> int:
        """That crossed a link."""
        ...

    def tensors(self) -> Mapping[str, RawTensor]:
        """By name; valid until `release`."""
        ...

    def release(self) -> None:
        """Nobody reads it any more. Idempotent."""
        ...


class Fetcher(Protocol):
    """One transport."""

    async def fetch(self, ask: PrepareUpdate, manifest: Manifest, store: BulkLink) -> Staged:
        """Bring the version here and verify it; `manifest` fits the engine.

        Raises:
            CannotFetch: not by this way; whatever it took is given back.
            EngineFailed: the bytes are not those that were published.
            RemoteProtocolError: the other side answered with something else.
        """
        ...

    def close(self) -> None:
        """Give back what is kept from version to version."""
        ...
