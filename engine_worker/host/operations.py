"""The commands of "More of an engine" as the engine host carries them out: by the engine's parts.

The actor has checked their values; here they meet the engine.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from rolloutbus.bus.security.zmq_dialer import Dialer
from rolloutbus.bus.wire.arrays import AnyArray, array_of
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.limits import MAX_PIECE_BYTES
from rolloutbus.bus.wire.messages.array import Array
from rolloutbus.bus.wire.messages.control import FlushCache, Flushed
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.engine import (
    Adapters,
    Embed,
    Embedded,
    GetLoad,
    Load,
    LoadLora,
    Rerank,
    Reranked,
    SaveWeights,
    Score,
    Scored,
    StartProfile,
    StopProfile,
    UnloadLora,
)
from rolloutbus.engine_worker.engine import Embedder, Engine, Int32s, PrefixCache, Scorer
from rolloutbus.engine_worker.features import lacks_tier
from rolloutbus.engine_worker.host.operator_paths import OperatorPaths
from rolloutbus.engine_worker.host.profiling import Profiles
from rolloutbus.engine_worker.host.saving import save_weights
from rolloutbus.engine_worker.weights.adapter_sources import adapter_folder, adapter_in_store

Result = TypeVar("Result")
Part = TypeVar("Part")
Operation = (
    FlushCache
    | Score
    | Embed
    | Rerank
    | LoadLora
    | UnloadLora
    | SaveWeights
    | StartProfile
    | StopProfile
    | GetLoad
)


class StoreAccess(NamedTuple):
    """How adapters are had from the weight store."""

    policy: str = "default"
    dialer: Dialer | None = None
    timeout_s: float = 300.0


class Operations:
    """One engine's; all methods on one event loop."""

    def __init__(
        self, engine: Engine, threads: Executor, paths: OperatorPaths, store: StoreAccess
    ) -> None:
        self._engine = engine
        self._threads = threads
        self._paths = paths
        self._store = store
        self._profiles = Profiles(paths.profile_dir)

    @property
    def kinds(self) -> list[str]:
        """Command kinds that the engine has the part for."""
        engine = self._engine
        parts = {
            "flush_cache": engine.cache,
            "score": engine.scorer,
            "embed": engine.embedder,
            "rerank": engine.reranker,
            "load_lora": engine.lora,
            "unload_lora": engine.lora,
            "save_weights": engine.checkpointer,
            "start_profile": engine.profiler,
            "stop_profile": engine.profiler,
            "get_load": engine.meter,
        }
        return [kind for kind, part in parts.items() if part is not None]

    @property
    def adapters(self) -> dict[str, int]:
        """Those that are loaded, and their versions."""
        lora = self._engine.lora
        return dict(lora.versions()) if lora is not None else {}

    async def do(self, body: Operation) -> msgspec.Struct:
        """Carry out one of `kinds`; returns the body of its `finished`.

        Raises:
            RequestError, EngineBusy, BusError: it failed.
        """
        try:
            if isinstance(body, LoadLora):
                return await self._load_lora(body)
            return await self._off_loop(lambda: self._do(body))
        except ValueError as error:  # the engine works, but not with this
            raise EngineFailed(bad_request("", str(error) or type(error).__name__)) from error

    def _do(self, body: Operation) -> msgspec.Struct:
        """In a thread; blocks."""
        engine = self._engine
        match body:
            case FlushCache():
                return Flushed(_flush(there(engine.cache), body))
            case Score():
                return _score(there(engine.scorer), body)
            case Embed():
                return _embed(there(engine.embedder), body)
            case Rerank():
                return Reranked(_array(there(engine.reranker).rerank(body.pairs)))
            case UnloadLora():
                there(engine.lora).unload(body.name)
                return Adapters(self.adapters)
            case SaveWeights():
                return save_weights(there(engine.checkpointer), body, self._paths.save_targets)
            case StartProfile():
                return self._profiles.start(there(engine.profiler), body)
            case StopProfile():
                return self._profiles.stop(there(engine.profiler))
            case GetLoad():
                gauges = there(engine.meter).load()
                return Load({name: float(value) for name, value in gauges.items()})
            case LoadLora():
                raise AssertionError("an adapter is fetched on the loop")

    async def _load_lora(self, ask: LoadLora) -> Adapters:
        lora, (policy, dialer, timeout_s) = there(self._engine.lora), self._store
        if not ask.path and ask.version and self.adapters.get(ask.name) == ask.version:
            return Adapters(self.adapters)  # numbers of a store are never used twice
        if ask.path:
            root = self._paths.weights_root
            source = await self._off_loop(lambda: adapter_folder(ask, root))
        else:
            source = await adapter_in_store(ask, policy, dialer, timeout_s)
        await self._off_loop(lambda: lora.load(ask.name, ask.version, source))
        return Adapters(self.adapters)

    async def _off_loop(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def there(part: Part | None) -> Part:
    """The part that a command is for; no other command gets here."""
    assert part is not None, "the worker lets no command through that its engine cannot do"
    return part


def _flush(cache: PrefixCache, body: FlushCache) -> int:
    missing = [tier for tier in body.tiers if tier not in cache.tiers]
    if missing:
        raise EngineFailed(lacks_tier(missing[0]))
    return cache.flush(body.tiers)


def _score(engine: Scorer, body: Score) -> Scored:
    scores, n_prompt_tokens = engine.score(
        _ints(body.query),
        [_ints(each) for each in body.items],
        body.label_token_ids,
        apply_softmax=body.apply_softmax,
        item_first=body.item_first,
    )
    return Scored(_array(scores), n_prompt_tokens)


def _embed(engine: Embedder, body: Embed) -> Embedded:
    rows, n_prompt_tokens = engine.embed([_ints(each) for each in body.inputs], body.dimensions)
    return Embedded(_array(rows), n_prompt_tokens)


def _ints(raw: bytes) -> Int32s:
    return np.frombuffer(raw, "<i4")


def _array(values: AnyArray) -> Array:
    """float32 [shape], as it is sent."""
    if values.size * 4 > MAX_PIECE_BYTES:
        message = f"{values.shape} numbers are more than {MAX_PIECE_BYTES} bytes; ask for less"
        raise EngineFailed(Problem("result_too_large", message, "failed"))
    return array_of(values.astype(np.float32, copy=False))
