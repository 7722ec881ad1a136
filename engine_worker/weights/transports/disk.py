"""`disk`: safetensors files below a root that the operator allows are read into a buffer."""

import asyncio
from functools import partial
from pathlib import Path

from rolloutbus.bus.paths import FileRules, open_named
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import total_bytes
from rolloutbus.bus.weights.tensor_files import read_shards
from rolloutbus.bus.wire.errors import EngineFailed, Refused, RemoteProtocolError
from rolloutbus.bus.wire.messages.weights import Manifest, PrepareUpdate
from rolloutbus.engine_worker.weights.buffers import SpareBuffer
from rolloutbus.engine_worker.weights.checks import verify
from rolloutbus.engine_worker.weights.staged import (
    CannotFetch,
    Fetcher,
    Staged,
    ask_manifest,
    in_buffer,
)

ASK_AGAIN_S = 0.1
"""While the store still writes the files."""


class Files(Fetcher):
    """Reads versions that the store has written to a disk that both sides see."""

    def __init__(self, root: Path, spare: SpareBuffer) -> None:
        self._rules = FileRules((root,))
        self._spare = spare

    async def fetch(self, ask: PrepareUpdate, manifest: Manifest, store: BulkLink) -> Staged:
        """Read and verify; see `Fetcher`. Waits for files that are being written."""
        at = _place(manifest)
        while not at:
            await asyncio.sleep(ASK_AGAIN_S)
            manifest = await ask_manifest(store, ask)
            at = _place(manifest)
        content = self._spare.take(total_bytes(manifest.tensors))
        try:
            await asyncio.to_thread(read_shards, partial(self._open, at), manifest.tensors, content)
            checks = await verify(content, manifest.tensors)
        except (Refused, RemoteProtocolError, OSError) as error:
            self._spare.give_back(content)
            raise CannotFetch(str(error)) from error
        except EngineFailed:
            # Not at a cancellation: then a thread is still at it.
            self._spare.give_back(content)
            raise
        return in_buffer(
            manifest,
            content,
            self._spare,
            transport="disk",
            moved_bytes=len(content),
            checks=checks,
        )

    def _open(self, at: str, name: str) -> int:
        return open_named(f"{at}/{name}", self._rules)


def _place(manifest: Manifest) -> str:
    """Where the files are; empty while they are being written.

    Raises:
        CannotFetch: there are none.
    """
    for offer in manifest.offers:
        if offer.transport == "disk":
            return offer.at
    raise CannotFetch("the version is not on disk")
