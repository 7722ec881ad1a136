"""Stages weight versions for one engine: checked against it, fetched, verified. Spec: "Weights"."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.shm import host_id
from rolloutbus.bus.wire.errors import EngineFailed, PeerLost, Refused, RemoteProtocolError
from rolloutbus.bus.wire.limits import MAX_SENTENCE_CHARS
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import Manifest, Prepared, PrepareUpdate, TensorCheck
from rolloutbus.engine_worker.engine import Engine, TensorSpec
from rolloutbus.engine_worker.weights.buffers import SpareBuffer, fresh_buffer
from rolloutbus.engine_worker.weights.checks import misfit
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor
from rolloutbus.engine_worker.weights.relay import Relay
from rolloutbus.engine_worker.weights.staged import CannotFetch, Fetcher, Staged, ask_manifest
from rolloutbus.engine_worker.weights.transports.collective import Collective
from rolloutbus.engine_worker.weights.transports.delta import ChangedSince
from rolloutbus.engine_worker.weights.transports.disk import Files
from rolloutbus.engine_worker.weights.transports.shm import SharedMemory
from rolloutbus.engine_worker.weights.transports.tcp import Pull


def ways_of_this_host(
    relay: Relay | None = None,
    dialer: Dialer | None = None,
    engine: Engine | None = None,
    root: str = "",
) -> Mapping[str, Fetcher]:
    """The fetcher of each transport that works here; `tcp` always does.

    `relay` serves what arrives to other workers; `dialer` has the keys to connect with, if any;
    `root` is a directory in which versions may be read from files, empty: none. `engine`: if its
    weights can be read, only what changed need be brought; versions are put into its shared
    memory, if it has any.
    """
    relay = relay or Relay()
    shared = engine.shared if engine is not None else None
    spare = SpareBuffer(relay.forget, shared.shared_buffer if shared else fresh_buffer)
    ways: dict[str, Fetcher] = {"shm": SharedMemory(), "tcp": Pull(spare, relay, dialer)}
    if engine is not None and engine.weights is not None:
        ways["delta"] = ChangedSince(engine.weights, spare)
    if root:
        ways["disk"] = Files(Path(root), spare)
    gpus = engine.facts.gpus if engine is not None else ()
    if find_spec("torch") is not None:
        ways["collective"] = Collective(spare)
    if len(gpus) == 1:
        # These import torch, as the engine has done already.
        from rolloutbus.engine_worker.weights.transports.cuda_ipc import CudaIpc  # noqa: PLC0415
        from rolloutbus.engine_worker.weights.transports.gpu_memory import (  # noqa: PLC0415
            SpareGpuMemory,
        )

        book = shared.handles if shared else None
        gpu_memory = SpareGpuMemory(gpus[0], book)
        ways["collective"] = Collective(spare, gpu_memory)
        ways["cuda_ipc"] = CudaIpc(gpu_memory, book)
    return ways


MAX_STAGED = 2
"""More versions staged than this: the oldest is dropped."""


class WeightReceiver:
    """Stages versions for one engine; all methods on one event loop."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        ways: Mapping[str, Fetcher],
        dialer: Dialer | None = None,
        relay: Relay | None = None,
    ) -> None:
        """`specs`: what the engine expects; `ways`: by transport, `tcp` among them.

        `relay` serves what is held here to other workers.
        """
        self._specs = {each.name: each for each in specs}
        self._ways = dict(ways)
        self._dialer = dialer
        self._relay = relay or Relay()
        self._staged: dict[int, Staged] = {}
        self._limits: dict[int, asyncio.Timeout] = {}
        """Of versions that are on their way here."""

    @property
    def transports(self) -> list[str]:
        """Transports by which it can take weights."""
        return sorted(self._ways)

    async def prepare(self, ask: PrepareUpdate, *, timeout_s: float) -> Prepared:
        """Stage a version beside the old weights and verify every tensor; idempotent.

        Raises:
            Refused: its tensors are not those of the engine (`.field` names one); nothing was
                allocated.
            EngineFailed: it could not be had, or its bytes are wrong; nothing is staged.
        """
        began = time.perf_counter()
        why = ""
        if ask.version not in self._staged:
            async with self._store(ask, timeout_s) as store:
                staged, why = await self._fetch(store, ask)
            self.give_back_spares()  # of other ways: what this one needs is in use
            while len(self._staged) >= MAX_STAGED:
                oldest = next(iter(self._staged))
                self._relay.end(self._staged[oldest].manifest.policy, oldest)
                self.leave(oldest)  # a caller that has not called `drop` may still read it
            self._staged[ask.version] = staged
            why = "; ".join(filter(None, (why, staged.why)))[:MAX_SENTENCE_CHARS]
            if staged.content is not None:
                self._relay.hold(staged.manifest, staged.content)
            else:
                self._relay.end(ask.policy, ask.version)
        staged = self._staged[ask.version]
        return Prepared(
            version=ask.version,
            size_bytes=sum(each.size_bytes for each in staged.manifest.tensors),
            transport=staged.transport,
            pull_ms=(time.perf_counter() - began) * 1e3,
            moved_bytes=staged.moved_bytes,
            why=why,
        )

    async def manifest(self, ask: PrepareUpdate, *, timeout_s: float) -> Manifest:
        """The store's manifest of the version; raises as `prepare` if it does not fit."""
        async with self._store(ask, timeout_s) as store:
            return await self._fitting(store, ask)

    def has(self, version: int) -> bool:
        """Whether the version is staged."""
        return version in self._staged

    def staged(self, version: int) -> Mapping[str, RawTensor]:
        """Raw little-endian bytes by tensor name, uint8 [size_bytes] each; valid until `drop`.

        Raises:
            KeyError: the version is not staged.
        """
        return self._staged[version].tensors

    def manifest_of(self, version: int) -> Manifest:
        """What a staged version holds.

        Raises:
            KeyError: the version is not staged.
        """
        return self._staged[version].manifest

    def checks_of(self, version: int) -> Mapping[str, TensorCheck]:
        """By name, of its tensors that were judged when they were verified.

        Raises:
            KeyError: the version is not staged.
        """
        return self._staged[version].checks

    def give_up(self, version: int) -> None:
        """Stop the transfer of a version that is not wanted any more, and drop what is here."""
        limit = self._limits.pop(version, None)
        if limit is not None and not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time())
        self.drop(version)

    def drop(self, version: int) -> None:
        """Free the bytes of a version, which are not read any more. Idempotent."""
        staged = self._staged.pop(version, None)
        if staged is not None:
            staged.release()

    def leave(self, version: int) -> None:
        """Drop a version that may be read: its tensors keep its bytes as they are. Idempotent."""
        self._staged.pop(version, None)

    def refuse(self, version: int) -> None:
        """Drop a version with wrong values: other workers cannot get it here either. Idempotent."""
        if version in self._staged:
            self._relay.end(self._staged[version].manifest.policy, version)
        self.drop(version)

    def keep_nothing(self) -> None:
        """Give back the memory that is kept from one version to the next."""
        for way in self._ways.values():
            way.close()

    def give_back_spares(self) -> None:
        """Give back the memory of the GPU that is kept from one version to the next."""
        for way in self._ways.values():
            way.give_back_spares()

    def close(self) -> None:
        """Drop everything."""
        for version in list(self._staged):
            self.drop(version)
        self.keep_nothing()

    @asynccontextmanager
    async def _store(self, ask: PrepareUpdate, timeout_s: float) -> AsyncGenerator[BulkLink]:
        """A link to the store; EngineFailed once the version is late or given up."""
        try:
            async with asyncio.timeout(timeout_s) as limit:
                self._limits[ask.version] = limit
                async with BulkLink(ask.bulk, self._dialer) as store:
                    yield store
        except TimeoutError as error:
            is_late = ask.version in self._limits
            problem = _too_late(ask, timeout_s) if is_late else _given_up(ask)
            raise EngineFailed(problem) from error
        except PeerLost as error:
            message = f"the weight store cannot be asked: {error}"
            raise EngineFailed(Problem("no_store", message, "not_started")) from error
        except RemoteProtocolError as error:
            raise EngineFailed(Problem("internal", str(error), "failed")) from error
        finally:
            self._limits.pop(ask.version, None)

    async def _fetch(self, store: BulkLink, ask: PrepareUpdate) -> tuple[Staged, str]:
        """Fetch by the transport that was asked for, else by the nearest; returns why, too."""
        manifest = await self._fitting(store, ask)
        # The way of a delta ends with the whole version by `tcp`, which is passed on to others.
        is_near = manifest.host == host_id() and ask.transport != "delta"
        nearest = ["shm"] if is_near else []
        why: list[str] = []
        for transport in dict.fromkeys((ask.transport, *nearest)):
            way = self._ways.get(transport)
            if way is None:
                why.append(f"this worker cannot take weights by {transport}")
                continue
            try:
                return await way.fetch(ask, manifest, store), "; ".join(why)
            except CannotFetch as error:
                why.append(f"{transport}: {error}")
        return await self._ways["tcp"].fetch(ask, manifest, store), "; ".join(why)

    async def _fitting(self, store: BulkLink, ask: PrepareUpdate) -> Manifest:
        manifest = await ask_manifest(store, ask)
        problem = misfit(self._specs, manifest.tensors)
        if problem is not None:
            raise Refused(problem)
        return manifest


def _given_up(ask: PrepareUpdate) -> Problem:
    message = f"version {ask.version} was given up on its way"
    return Problem("update_failed", message, "failed")


def _too_late(ask: PrepareUpdate, timeout_s: float) -> Problem:
    message = f"version {ask.version} was not here after {timeout_s:g} s from {ask.bulk}"
    return Problem("deadline", message, "failed")
