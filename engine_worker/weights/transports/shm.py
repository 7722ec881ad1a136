"""`shm`: the store's segment is mapped and read in place.

It stays pinned until `release`, and the engine copies straight from it: no second copy.
"""

import asyncio

from rolloutbus.bus.backoff import wait_after
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import bytes_of, total_bytes
from rolloutbus.bus.weights.shm import SegmentGone, SegmentReader, host_id
from rolloutbus.bus.wire.messages.weights import Manifest, PrepareUpdate
from rolloutbus.engine_worker.weights.checks import verify
from rolloutbus.engine_worker.weights.staged import CannotFetch, Fetcher, Staged, ask_manifest

PIN_TRIES = 5
"""A segment may be renamed between the manifest and the pin; then the manifest is asked again."""
PIN_PAUSE_S = 0.05
PIN_PAUSE_MAX_S = 0.2


class SharedMemory(Fetcher):
    """Maps versions of a store on this host."""

    def __init__(self) -> None:
        self._reader = SegmentReader()

    async def fetch(self, ask: PrepareUpdate, manifest: Manifest, store: BulkLink) -> Staged:
        """Pin and verify; see `Fetcher`."""
        if manifest.host != host_id():
            raise CannotFetch("the store is on another host")
        reason = ""
        for n_tries in range(PIN_TRIES):
            try:
                pin = self._reader.pin(manifest.segment, total_bytes(manifest.tensors))
            except SegmentGone as error:
                reason = str(error)
                # The store is sealing or restarting.
                await asyncio.sleep(wait_after(n_tries, PIN_PAUSE_S, PIN_PAUSE_MAX_S))
                manifest = await ask_manifest(store, ask)
                continue
            try:
                checks = await verify(pin.content, manifest.tensors)
            except BaseException:
                pin.release()
                self._reader.forget()
                raise
            tensors = {each.name: bytes_of(pin.content, each) for each in manifest.tensors}
            return Staged(manifest, "shm", 0, tensors, pin.release, checks=checks)
        raise CannotFetch(reason)

    def close(self) -> None:
        """Unmap everything."""
        self._reader.forget()
