"""The worker's side of a weight version: checked against the engine, fetched, verified, staged.

Spec: docs/protocol.md, "Weights".
"""

import asyncio
import time
from collections.abc import Mapping, Sequence

from bus.bulk import BulkLink
from bus.errors import EngineFailed, Refused, RemoteProtocolError
from bus.messages.endings import Problem
from bus.messages.weights import Manifest, Prepared, PrepareUpdate
from bus.security.zmq_dialer import Dialer
from engine_worker.engine import RawTensor, TensorSpec
from engine_worker.weights.asking import ask_manifest
from engine_worker.weights.staged import CannotFetch, Fetcher, Staged

MAX_STAGED = 2
"""More versions staged than this: the oldest is dropped."""


class WeightReceiver:
    """Stages versions for one engine; all methods on one event loop."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        ways: Mapping[str, Fetcher],
        dialer: Dialer | None = None,
    ) -> None:
        """`specs` is what the engine expects; `ways` by transport, `tcp` among them."""
        self._specs = {each.name: each for each in specs}
        self._ways = dict(ways)
        self._dialer = dialer
        self._staged: dict[int, Staged] = {}

    @property
    def transports(self) -> list[str]:
        """Ways by which it can take weights."""
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
            try:
                async with asyncio.timeout(timeout_s), BulkLink(ask.bulk, self._dialer) as store:
                    staged, why = await self._fetch(store, ask)
            except TimeoutError as error:
                raise EngineFailed(_too_late(ask, timeout_s)) from error
            except RemoteProtocolError as error:
                raise EngineFailed(Problem("internal", str(error), "failed")) from error
            while len(self._staged) >= MAX_STAGED:
                # Not released: whoever did not call `drop` may still read it.
                del self._staged[next(iter(self._staged))]
            self._staged[ask.version] = staged
        staged = self._staged[ask.version]
        return Prepared(
            version=ask.version,
            size_bytes=sum(each.size_bytes for each in staged.manifest.tensors),
            transport=staged.transport,
            pull_ms=(time.perf_counter() - began) * 1e3,
            moved_bytes=staged.moved_bytes,
            why=why,
        )

    def staged(self, version: int) -> Mapping[str, RawTensor]:
        """Raw little-endian bytes by tensor name, uint8 [size_bytes] each; valid until `drop`.

        Raises:
            KeyError: the version is not staged.
        """
        return self._staged[version].tensors()

    def drop(self, version: int) -> None:
        """The version is installed or given up: nobody reads its bytes any more. Idempotent."""
        staged = self._staged.pop(version, None)
        if staged is not None:
            staged.release()

    def close(self) -> None:
        """Drop everything."""
        for version in list(self._staged):
            self.drop(version)
        for way in self._ways.values():
            way.close()

    async def _fetch(self, store: BulkLink, ask: PrepareUpdate) -> tuple[Staged, str]:
        """By the way that was asked for, else by `tcp`; and why by the latter."""
        manifest = await ask_manifest(store, ask)
        problem = self._misfit(manifest)
        if problem is not None:
            raise Refused(problem)
        way = self._ways.get(ask.transport)
        if way is None:
            why = f"this worker cannot take weights by {ask.transport}"
        else:
            try:
                return await way.fetch(ask, manifest, store), ""
            except CannotFetch as error:
                why = f"{ask.transport}: {error}"
        return await self._ways["tcp"].fetch(ask, manifest, store), why

    def _misfit(self, manifest: Manifest) -> Problem | None:
        """Why the engine cannot take these tensors; None if it can."""
        for tensor in manifest.tensors:
            spec = self._specs.get(tensor.name)
            if spec is None:
                return _wrong_tensor(tensor.name, "the engine has no such tensor")
            if (spec.dtype, spec.shape) != (tensor.dtype, tensor.shape):
                message = (
                    f"published as {tensor.dtype} {list(tensor.shape)}, the engine has "
                    f"{spec.dtype} {list(spec.shape)}"
                )
                return _wrong_tensor(tensor.name, message)
        missing = self._specs.keys() - {each.name for each in manifest.tensors}
        if missing:
            return _wrong_tensor(min(missing), f"{len(missing)} tensors of the engine are missing")
        return None


def _wrong_tensor(name: str, reason: str) -> Problem:
    message = f"tensor {name!r}: {reason}"
    return Problem("bad_request", message, "not_started", field=f"tensors.{name}")


def _too_late(ask: PrepareUpdate, timeout_s: float) -> Problem:
    message = f"version {ask.version} was not here after {timeout_s:g} s from {ask.bulk}"
    return Problem("deadline", message, "failed")
