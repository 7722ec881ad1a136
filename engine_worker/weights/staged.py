"""Staged versions, and what all transports share that fetch them.

A `Fetcher` brings the bytes of one version, verified, where the engine can read them, beside the
weights that it serves with. `WeightReceiver` chooses the fetcher; they do not know one another.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import Bytes, bytes_of, check_tensors
from rolloutbus.bus.wire.errors import Refused, RemoteProtocolError
from rolloutbus.bus.wire.limits import CHUNK_BYTES
from rolloutbus.bus.wire.messages.weights import (
    Chunk,
    Manifest,
    PrepareUpdate,
    PullChunk,
    PullManifest,
    TensorCheck,
)
from rolloutbus.engine_worker.weights.buffers import SpareBuffer
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


async def pull_chunks(
    link: BulkLink,
    policy: str,
    version: int,
    size_bytes: int,
    put: Callable[[int, bytes], None],
    *,
    base: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Pull `size_bytes` bytes, several chunks at once; `put` gets each with its offset.

    Raises:
        EngineFailed, RemoteProtocolError: as of `ask_chunk`.
    """

    async def pull(offset: int) -> None:
        n_bytes = min(chunk_bytes, size_bytes - offset)
        put(offset, await ask_chunk(link, PullChunk(policy, version, offset, n_bytes, base)))

    await link.ask_all(partial(pull, offset) for offset in range(0, size_bytes, chunk_bytes))


class CannotFetch(Exception):
    """This transport cannot bring the version; another one may. The text says why."""


@dataclass(slots=True, eq=False)
class Staged:
    """One verified version, held or mapped until `release`."""

    manifest: Manifest
    transport: str
    """How it came, a name of docs/protocol.md, "Weights"."""
    moved_bytes: int
    """That crossed a link."""
    tensors: Mapping[str, RawTensor]
    """By name; none after `release`."""
    give_back: Callable[[], None]
    """Frees the memory that the tensors lie in, once."""
    content: Bytes | None = None
    """The whole version, uint8 [size_bytes], if it lies in a buffer of ours."""
    why: str = ""
    """Why not all of it came from the first that was asked."""
    checks: Mapping[str, TensorCheck] = field(default_factory=dict[str, TensorCheck])
    """By name, of the tensors that were judged when they were verified."""

    def release(self) -> None:
        """Free its memory, which is not read any more. Idempotent."""
        give_back, self.give_back, self.tensors = self.give_back, _nothing, {}
        give_back()


def _nothing() -> None:
    """It was given back already."""


def in_buffer(
    manifest: Manifest,
    content: Bytes,
    spare: SpareBuffer,
    *,
    transport: str,
    moved_bytes: int,
    why: str = "",
    checks: Mapping[str, TensorCheck] | None = None,
) -> Staged:
    """A version that lies in a buffer, which its release gives back to `spare`."""
    tensors = {each.name: bytes_of(content, each) for each in manifest.tensors}
    give_back = partial(spare.give_back, content)
    return Staged(manifest, transport, moved_bytes, tensors, give_back, content, why, checks or {})


class Fetcher(Protocol):
    """One transport."""

    async def fetch(self, ask: PrepareUpdate, manifest: Manifest, store: BulkLink) -> Staged:
        """Bring the version here and verify it; `manifest` fits the engine.

        Raises:
            CannotFetch: not by this transport; all that it took is given back.
            EngineFailed: the bytes are not those that were published.
            RemoteProtocolError: the peer answered with something else.
        """
        ...

    def close(self) -> None:
        """Give back what is kept from version to version; by default nothing is."""

    def give_back_spares(self) -> None:
        """Give back what is kept on the GPU, which somebody else needs; by default nothing is."""
