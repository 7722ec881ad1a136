"""What stands between a weight version and the engine: the bytes, and the ways they come by.

A way (`Fetcher`) brings the bytes of one version where the engine can read them, verified, beside
the weights that it serves with. `engine_worker.weights.receiver` chooses and keeps; the ways know
nothing of one another.
"""

from collections.abc import Mapping
from typing import Protocol

from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import check_tensors
from rolloutbus.bus.wire.errors import Refused, RemoteProtocolError
from rolloutbus.bus.wire.messages.weights import (
    Chunk,
    Manifest,
    PrepareUpdate,
    PullChunk,
    PullManifest,
)
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor


async def ask_manifest(link: BulkLink, ask: PrepareUpdate) -> Manifest:
    """The manifest of the version to be prepared; not yet compared with the engine.

    Raises:
        Refused: it is not a possible manifest.
        EngineFailed: the holder has no such version.
        RemoteProtocolError: the answer is of another kind or version.
    """
    question = PullManifest(policy=ask.policy, version=ask.version)
    manifest = await link.ask("pull_manifest", question)
    if not isinstance(manifest, Manifest) or manifest.version != ask.version:
        raise RemoteProtocolError("pull_manifest was answered with something else")
    problem = check_tensors(manifest.tensors)
    if problem is not None:
        raise Refused(problem)
    return manifest


async def ask_chunk(link: BulkLink, ask: PullChunk) -> bytes:
    """The bytes asked for, all of them.

    Raises:
        EngineFailed: the holder has no such bytes.
        RemoteProtocolError: these are other bytes.
    """
    chunk = await link.ask("pull_chunk", ask)
    is_right = (
        isinstance(chunk, Chunk)
        and chunk.offset == ask.offset
        and len(chunk.content) == ask.size_bytes
    )
    if not is_right or not isinstance(chunk, Chunk):
        raise RemoteProtocolError("pull_chunk was answered with other bytes")
    return chunk.content


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
