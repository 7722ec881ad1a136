"""Weight commands as the engine host carries them out: take a version, or read what is active."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

import msgspec

from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.weights import (
    AbortUpdate,
    CheckWeights,
    Committed,
    CommitUpdate,
    GetWeights,
    ListWeights,
    Manifest,
    Prepared,
    PrepareUpdate,
    TensorCheck,
)
from rolloutbus.engine_worker.engine import Engine, WeightSink
from rolloutbus.engine_worker.weights.active import ActiveWeights
from rolloutbus.engine_worker.weights.checks import require_sound
from rolloutbus.engine_worker.weights.in_place import InPlace
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor
from rolloutbus.engine_worker.weights.receiver import WeightReceiver, ways_of_this_host
from rolloutbus.engine_worker.weights.relay import Relay

Result = TypeVar("Result")
WeightCommand = PrepareUpdate | CommitUpdate | AbortUpdate | CheckWeights | GetWeights | ListWeights
WEIGHT_COMMANDS = (
    *("prepare_update", "commit_update", "abort_update"),
    *("check_weights", "get_weights", "list_weights"),
)
"""Their kinds."""
_TO_ITS_GPU = {"cuda_ipc", "collective"}
"""Transports that need room for a version on the engine's GPU."""


class WeightCommands:
    """Carries out the weight commands of one engine; all methods on one event loop."""

    def __init__(
        self,
        engine: Engine,
        weights: WeightSink,
        threads: Executor,
        timeout_s: float,
        *,
        relay: Relay,
        dialer: Dialer | None = None,
        root: str = "",
    ) -> None:
        """`weights` is the engine's part; its calls may block in `threads`.

        `timeout_s` is for the bytes of a version to come; versions may be read from files in the
        directory `root`, empty: none.
        """
        self._engine = engine
        self._weights = weights
        self._threads = threads
        self._timeout_s = timeout_s
        self._brought: set[int] = set()
        """Versions that the engine has staged, or is about to."""
        self._ready: set[int] = set()
        """Those of them that it has, and that were found sound."""
        self._installing: set[int] = set()
        self._asked = ""
        """Transport that was asked for last."""
        self._judging: dict[int, asyncio.Future[None]] = {}
        specs = weights.specs()
        self._active = ActiveWeights(weights, specs)
        overwriter = engine.overwriter
        self._in_place = InPlace(overwriter, dialer) if overwriter is not None else None
        ways = ways_of_this_host(relay, dialer, engine, root)
        self._receiver = WeightReceiver(specs, ways, dialer, relay)

    @property
    def transports(self) -> list[str]:
        """Transports by which the engine can take weights."""
        return self._receiver.transports

    async def give_back_spares(self) -> None:
        """Give back memory of the GPU that is kept for the next version: somebody else needs it."""
        self._receiver.give_back_spares()
        await self._off_loop(self._weights.give_back_spares)

    async def do(self, body: WeightCommand) -> msgspec.Struct:
        """Carry out one of WEIGHT_COMMANDS; returns the body of its `finished`.

        Raises:
            RequestError, EngineBusy, BusError: it failed.
        """
        match body:
            case CheckWeights():
                return await self._off_loop(lambda: self._active.check(body))
            case GetWeights():
                return await self._off_loop(lambda: self._active.get(body))
            case ListWeights():
                return self._active.list()
            case PrepareUpdate():
                return await self._prepare(body)
            case CommitUpdate():
                return await self._commit(body)
            case AbortUpdate(version=version):
                await self._give_up(version)
                return Done()

    async def _prepare(self, body: PrepareUpdate) -> Prepared:
        if self._is_active(body.version):
            return Prepared(body.version, 0, "", 0.0)
        # Torn weights leave no choice to an engine that takes whole versions only.
        if body.mode == "staged" or (self._in_place is None and self._engine.stats().is_torn):
            return await self._stage(body)
        if self._in_place is None:
            message = (
                'This worker\'s engine cannot overwrite its weights; publish with mode="staged".'
            )
            raise EngineFailed(Problem("unsupported", message, "not_started", field="mode"))
        manifest = await self._receiver.manifest(body, timeout_s=self._timeout_s)
        self._receiver.keep_nothing()  # to overwrite is for engines without room for a second copy
        return self._in_place.agree(body, manifest)

    async def _stage(self, body: PrepareUpdate) -> Prepared:
        asked_before, self._asked = self._asked, body.transport
        if body.transport in _TO_ITS_GPU and asked_before not in _TO_ITS_GPU:
            # It keeps memory for a copy of its own: there may be room for one copy only.
            await self._off_loop(self._weights.give_back_spares)
        before = [self._receiver.staged(each) for each in self._brought if self._receiver.has(each)]
        prepared = await self._receiver.prepare(body, timeout_s=self._timeout_s)
        self._brought.add(body.version)  # before any wait, in which it may be given up
        for old in [version for version in self._brought if not self._receiver.has(version)]:
            await self._unstage(old)
        del before  # not sooner: the engine's other processes had its memory open
        await self._require_wanted(body.version)
        tensors = self._receiver.staged(body.version)
        # Side by side: the engine copies it, mostly by its device, while what was not judged when
        # it was verified is read.
        staging = self._off_loop(lambda: self._weights.stage(body.version, tensors))
        try:
            await self._judged(body.version)
        except EngineFailed:
            await asyncio.wait((staging,))
            staging.exception()  # retrieved: asyncio would log it
            await self._unstage(body.version)
            self._receiver.refuse(body.version)
            raise
        except asyncio.CancelledError:
            staging.cancel()
            raise
        await staging
        await self._require_wanted(body.version)
        self._ready.add(body.version)
        return prepared

    async def _require_wanted(self, version: int) -> None:
        """Raises EngineFailed if the version was given up meanwhile; the engine has none of it."""
        if version in self._brought and self._receiver.has(version):
            return
        await self._unstage(version)
        message = f"version {version} was given up while the engine staged it"
        raise EngineFailed(Problem("update_failed", message, "failed"))

    async def _judged(self, version: int) -> None:
        """Waits until a version was found sound, which goes on if this is cancelled.

        Raises:
            EngineFailed: it is not; `.field` names the tensor.
        """
        receiver = self._receiver
        tensors, manifest = receiver.staged(version), receiver.manifest_of(version)
        judge = partial(self._judge, tensors, manifest, receiver.checks_of(version))
        judging = asyncio.ensure_future(asyncio.to_thread(judge))
        self._judging[version] = judging
        try:
            await asyncio.shield(judging)
        finally:
            judging.add_done_callback(partial(self._end_judging, version))

    def _end_judging(self, version: int, judging: asyncio.Future[None]) -> None:
        if self._judging.get(version) is judging:
            del self._judging[version]
        if not judging.cancelled():
            judging.exception()  # retrieved: asyncio would log it

    async def _unstage(self, version: int) -> None:
        self._brought.discard(version)
        self._ready.discard(version)
        await self._off_loop(lambda: self._weights.unstage(version))

    async def _give_up(self, version: int) -> None:
        # Before its bytes are given back: who reads them would read others.
        await self._unstage(version)
        if version in self._judging:
            await asyncio.wait((self._judging[version],))
        if version in self._installing:
            self._receiver.leave(version)
        else:
            self._receiver.give_up(version)
        if self._in_place is not None:
            self._in_place.drop(version)

    async def _commit(self, body: CommitUpdate) -> Committed:
        if self._is_active(body.version):
            return Committed(body.version, 0.0)
        if self._receiver.has(body.version) and body.version in self._ready:
            tensors = self._receiver.staged(body.version)
            self._installing.add(body.version)
            try:
                swap = await self._off_loop(
                    lambda: self._weights.install(body.version, tensors, body.in_flight)
                )
            finally:
                self._installing.discard(body.version)
            self._receiver.drop(body.version)
            return Committed(swap.version, swap.stall_ms, swap.n_retracted, swap.n_aborted)
        if self._in_place is not None and self._in_place.has(body.version):
            return await self._in_place.commit(body, self._timeout_s)
        message = f"Version {body.version} is not staged here; prepare it first."
        raise EngineFailed(Problem("update_failed", message, "not_started"))

    def _is_active(self, version: int) -> bool:
        stats = self._engine.stats()
        return version <= stats.version and not stats.is_torn

    def _judge(
        self,
        tensors: Mapping[str, RawTensor],
        manifest: Manifest,
        checks: Mapping[str, TensorCheck],
    ) -> None:
        require_sound(
            tensors,
            manifest.tensors,
            self._is_zero_now,
            allow_zeros=manifest.allow_zeros,
            checks=checks,
        )

    def _is_zero_now(self, name: str) -> bool:
        """Whether a tensor was all zero; torn and made-up weights do not show it: they count so."""
        stats = self._engine.stats()
        is_made_up = self._engine.facts.is_made_up and not stats.version
        return stats.is_torn or is_made_up or self._active.is_zero(name)

    def _off_loop(self, call: Callable[[], Result]) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(self._threads, call)
