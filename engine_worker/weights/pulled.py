"""`tcp`: chunks are pulled over a bulk socket into a buffer that is used again."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial

from bus.bulk import BulkLink
from bus.manifest import Bytes, bytes_of, total_bytes
from bus.messages.limits import CHUNK_BYTES
from bus.messages.weights import Manifest, PrepareUpdate, PullChunk
from engine_worker.weights.asking import ask_chunk
from engine_worker.weights.buffers import SpareBuffer
from engine_worker.weights.verify import verify


class HeldVersion:
    """A version in a buffer of ours."""

    def __init__(
        self,
        manifest: Manifest,
        content: Bytes,
        spare: SpareBuffer,
        *,
        transport: str,
        moved_bytes: int,
    ) -> None:
        self.manifest = manifest
        self.content = content
        self.transport = transport
        self.moved_bytes = moved_bytes
        self._spare = spare

    def tensors(self) -> Mapping[str, Bytes]:
        """Views of the buffer."""
        return {each.name: bytes_of(self.content, each) for each in self.manifest.tensors}

    def release(self) -> None:
        """The buffer may be used for the next version."""
        self._spare.give_back(self.content)


class Pull:
    """Pulls from the store."""

    def __init__(self, spare: SpareBuffer) -> None:
        self._spare = spare

    async def fetch(self, ask: PrepareUpdate, manifest: Manifest, store: BulkLink) -> HeldVersion:
        """Pull and verify; see `Fetcher`."""
        size_bytes = total_bytes(manifest.tensors)
        content = self._spare.take(size_bytes)
        await store.ask_all(_chunks(store, ask, content))
        await verify(content, manifest.tensors)
        return HeldVersion(manifest, content, self._spare, transport="tcp", moved_bytes=size_bytes)

    def close(self) -> None:
        """Nothing is kept but the spare buffer, which is its owner's."""


def _chunks(
    link: BulkLink, ask: PrepareUpdate, content: Bytes
) -> Iterator[Callable[[], Awaitable[None]]]:
    for offset in range(0, len(content), CHUNK_BYTES):
        size_bytes = min(CHUNK_BYTES, len(content) - offset)
        chunk = PullChunk(ask.policy, ask.version, offset, size_bytes)
        yield partial(_pull_chunk, link, chunk, content)


async def _pull_chunk(link: BulkLink, ask: PullChunk, content: Bytes) -> None:
    content.data[ask.offset : ask.offset + ask.size_bytes] = await ask_chunk(link, ask)
