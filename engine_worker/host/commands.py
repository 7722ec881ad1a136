"""Control commands as the engine host carries them out: off its loop, by the engine's parts.

The actor has checked that a command fits the worker's state, and its values; here it meets the
engine.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import numpy as np

from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.wire.codec import AnyArray, array_of, unpack
from rolloutbus.bus.wire.commands import done_by
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import BusError, EngineFailed, RequestError
from rolloutbus.bus.wire.limits import MAX_PIECE_BYTES
from rolloutbus.bus.wire.messages.control import (
    Adapters,
    Embed,
    Embedded,
    FlushCache,
    Flushed,
    GetLoad,
    Load,
    LoadLora,
    Memory,
    Pause,
    Rerank,
    Reranked,
    Resume,
    SaveWeights,
    Score,
    Scored,
    Sleep,
    StartProfile,
    StopProfile,
    UnloadLora,
    WakeUp,
)
from rolloutbus.bus.wire.messages.endings import Done, Problem, bad_request
from rolloutbus.bus.wire.messages.generation import Array
from rolloutbus.engine_worker.engine import (
    Embedder,
    Engine,
    EngineBusy,
    Int32s,
    PrefixCache,
    Scorer,
)
from rolloutbus.engine_worker.features import lacks_tier
from rolloutbus.engine_worker.host.files import OperatorPaths, Profiles, save_weights
from rolloutbus.engine_worker.host.weight_commands import (
    WEIGHT_COMMANDS,
    WeightCommand,
    WeightCommands,
)
from rolloutbus.engine_worker.weights.adapter_sources import adapter_folder, adapter_in_store
from rolloutbus.engine_worker.weights.relay import Relay

Result = TypeVar("Result")
Part = TypeVar("Part")


class HostCommands:
    """One engine's control surface; all methods on one event loop."""

    def __init__(
        self,
        engine: Engine,
        pull_timeout_s: float,
        dialer: Dialer | None = None,
        relay: Relay | None = None,
        paths: OperatorPaths | None = None,
        policy: str = "default",
    ) -> None:
        """`pull_timeout_s` is for the bytes of a version or an adapter to come.

        `dialer` has the keys to connect with, if any; `relay` serves versions to other workers;
        `paths`: where commands may read and write, None: nowhere; `policy`: of the weights.
        """
        self._engine = engine
        self._pull_timeout_s = pull_timeout_s
        self._dialer = dialer
        self._paths = paths or OperatorPaths()
        self._policy = policy
        # One for each kind: a `resume` must find a thread while a `pause` drains in another.
        self._threads = ThreadPoolExecutor(len(done_by("engine")), "engine-command")
        self._asleep: set[str] = set()
        self._profiles = Profiles(self._paths.profile_dir)
        self._weights: WeightCommands | None = None
        if engine.weights is not None:
            self._weights = WeightCommands(
                *(engine, engine.weights, self._threads, pull_timeout_s),
                relay=relay or Relay(),
                dialer=dialer,
                root=self._paths.weights_root,
            )

    @property
    def capabilities(self) -> list[str]:
        """Command kinds that the engine has the part for."""
        engine = self._engine
        parts = {
            "pause": engine,
            "resume": engine,
            "sleep": engine.memory,
            "wake_up": engine.memory,
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
            **dict.fromkeys(WEIGHT_COMMANDS, engine.weights),
        }
        return sorted(kind for kind, part in parts.items() if part is not None)

    @property
    def adapters(self) -> dict[str, int]:
        """Versions of the loaded adapters, by name."""
        lora = self._engine.lora
        return dict(lora.versions()) if lora is not None else {}

    @property
    def transports(self) -> list[str]:
        """Transports by which the engine can take weights."""
        return self._weights.transports if self._weights is not None else []

    async def carry_out(self, entry: Entry) -> tuple[str, msgspec.Struct]:
        """Carry out a command; returns kind and body of its ending."""
        try:
            return "finished", await self._do(unpack(entry))
        except RequestError as error:
            return "failed", error.problem
        except EngineBusy as refusal:  # nothing was changed; an engine that works goes on
            return "failed", Problem(code="busy", message=str(refusal), outcome="not_started")
        except (BusError, ValueError, OSError) as error:
            code = "update_failed" if entry.kind.endswith("_update") else "engine_failed"
            message = f"{type(error).__name__}: {error}"[:500]
            return "failed", Problem(code=code, message=message, outcome="failed")

    async def _do(self, body: msgspec.Struct) -> msgspec.Struct:
        if isinstance(body, WeightCommand):
            return await there(self._weights).do(body)
        match body:
            case Pause(mode):
                await self._off_loop(lambda: self._engine.pause(mode))
                return Done()
            case Resume():
                await self._off_loop(self._engine.resume)
                return Done()
            case Sleep() | WakeUp():
                return await self._memory(body)
            case _:
                pass
        try:
            if isinstance(body, LoadLora):
                return await self._load_lora(body)
            return await self._off_loop(lambda: self._do_blocking(body))
        except ValueError as error:  # the engine works, but not with this
            raise EngineFailed(bad_request("", str(error) or type(error).__name__)) from error

    def _do_blocking(self, body: msgspec.Struct) -> msgspec.Struct:
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
            case _:
                raise ValueError(f"the engine host cannot do {type(body).__name__}")

    async def _memory(self, body: Sleep | WakeUp) -> Memory:
        memory, tags = there(self._engine.memory), list(body.tags)
        try:
            if isinstance(body, Sleep):
                freed = await self._off_loop(lambda: memory.sleep(tags))
                await self._give_back_spares()
                self._asleep |= set(tags)
            else:
                # Of an update between two of these: the engine may need all that is free.
                await self._give_back_spares()
                freed = await self._off_loop(lambda: memory.wake_up(tags))
                self._asleep -= set(tags)
        except ValueError as error:  # the engine works, but has no such tag
            raise EngineFailed(bad_request("tags", str(error))) from error
        return Memory(dict(freed.bytes_by_tag), sorted(self._asleep))

    async def _give_back_spares(self) -> None:
        if self._weights is not None:
            await self._weights.give_back_spares()

    async def _load_lora(self, ask: LoadLora) -> Adapters:
        lora = there(self._engine.lora)
        if not ask.path and ask.version and self.adapters.get(ask.name) == ask.version:
            return Adapters(self.adapters)  # numbers of a store are never used twice
        if ask.path:
            root = self._paths.weights_root
            source = await self._off_loop(lambda: adapter_folder(ask, root))
        else:
            source = await adapter_in_store(ask, self._policy, self._dialer, self._pull_timeout_s)
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
    """Converts numbers to the float32 array that is sent."""
    if values.size * 4 > MAX_PIECE_BYTES:
        message = f"{values.shape} numbers are more than {MAX_PIECE_BYTES} bytes; ask for less"
        raise EngineFailed(Problem("result_too_large", message, "failed"))
    return array_of(values.astype(np.float32, copy=False))
