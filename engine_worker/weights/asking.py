"""Questions to whoever holds a version, and checks that the answers are answers to them."""

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
