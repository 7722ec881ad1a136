"""The commands of "More of an engine" as the engine host carries them out: by the engine's parts.

The actor has checked their values; here they meet the engine.
"""

import asyncio
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

import msgspec
import numpy as np

from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.wire.codec import AnyArray, array_of
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.limits import MAX_PIECE_BYTES
from rolloutbus.bus.wire.messages.array import Array
from rolloutbus.bus.wire.messages.control import FlushCache, Flushed
from rolloutbus.bus.wire.messages.endings import Done, Problem, bad_request
from rolloutbus.bus.wire.messages.engine import (
    Adapters,
    Embed,
    Embedded,
    GetLoad,
    Load,
    LoadLora,
    Profiled,
    Rerank,
    Reranked,
    Saved,
    SaveWeights,
    Score,
    Scored,
    StartProfile,
    StopProfile,
    UnloadLora,
)
from rolloutbus.engine_worker.engine import (
    Checkpointer,
    Embedder,
    Engine,
    EngineBusy,
    Int32s,
    PrefixCache,
    Profiler,
    Scorer,
)
from rolloutbus.engine_worker.features import lacks_tier
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.engine_worker.weights.adapter_sources import adapter_folder, adapter_in_store

NOWHERE: Mapping[str, str] = {}


class OperatorPaths(NamedTuple):
    """From the worker's settings; peers name what lies below these, never anything else."""

    weights_root: str = ""
    """Versions and adapters are read from files here; empty: none are."""
    save_targets: Mapping[str, str] = NOWHERE
    """Name -> directory or address that weights may be written to."""
    profile_dir: str = ""
    """Profiles are written here; empty: none are."""

    @classmethod
    def of(cls, settings: WorkerSettings) -> Self:
        """Those of a worker."""
        return cls(settings.weights_root, settings.save_targets, settings.profile_dir)


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


class Profiles:
    """The one that is being recorded, if any."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._folder: Path | None = None

    def start(self, profiler: Profiler, ask: StartProfile) -> Done:
        """Begin one.

        Raises:
            EngineFailed: the operator allows none.
            EngineBusy: one is being recorded.
        """
        if not self._root:
            message = "This worker writes no profiles: its operator has set no `profile_dir`."
            raise EngineFailed(Problem("unsupported", message, "not_started"))
        if self._folder is not None:
            raise EngineBusy("a profile is being recorded; send stop_profile first")
        folder = Path(self._root) / f"profile-{secrets.token_hex(4)}"
        folder.mkdir(parents=True)
        try:
            profiler.start(folder, ask)
        except BaseException:
            folder.rmdir()
            raise
        self._folder = folder
        return Done(folder.name)

    def stop(self, profiler: Profiler) -> Profiled:
        """End it, and tell its files.

        Raises:
            EngineBusy: none is being recorded.
        """
        folder = self._folder
        if folder is None:
            raise EngineBusy("no profile is being recorded; send start_profile first")
        profiler.stop()
        self._folder = None
        root = Path(self._root)
        found = [each for each in folder.rglob("*") if each.is_file()]
        return Profiled(sorted(str(each.relative_to(root)) for each in found))


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


def save_weights(checkpointer: Checkpointer, ask: SaveWeights, targets: Mapping[str, str]) -> Saved:
    """Have the engine write into a fresh directory, which then gets the name asked for.

    Raises:
        EngineFailed: the operator has named no such place, it does not fit the kind, or something
            is there already.
        ValueError, EngineBusy, OSError: the engine could not write; nothing is left behind.
    """
    place = _place(ask, targets)
    if ask.kind == "remote":
        address = f"{place.rstrip('/')}/{ask.name}"
        checkpointer.save(address, ask.kind)
        return Saved(address, [], 0)
    if not Path(place).is_dir():
        message = f"the directory of {ask.target!r} is not there; its operator has to make it"
        raise _refusal("unsupported", message, "target")
    folder = Path(place) / ask.name
    if folder.is_symlink() or (folder.exists() and any(folder.iterdir())):
        raise _refusal("bad_request", f"{ask.name!r} is there already; choose another name", "name")
    fresh = folder.with_name(f".{ask.name}-{secrets.token_hex(4)}")
    fresh.mkdir()
    try:
        checkpointer.save(str(fresh), ask.kind)
        files = sorted(_files(fresh))
        size_bytes = sum((fresh / name).stat().st_size for name in files)
        fresh.rename(folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return Saved(str(folder), files, size_bytes)


def _place(ask: SaveWeights, targets: Mapping[str, str]) -> str:
    place = targets.get(ask.target)
    if place is None:
        known = ", ".join(sorted(targets)) or "none; see the worker's setting `save_targets`"
        message = f"this worker's operator has named no place {ask.target!r}; named are: {known}"
        raise _refusal("unsupported", message, "target")
    if ("://" in place) != (ask.kind == "remote"):
        what = "an address" if "://" in place else "a directory"
        message = f"{ask.target!r} is {what}, which {ask.kind!r} is not written to"
        raise _refusal("bad_request", message, "kind")
    return place


def _files(folder: Path) -> Iterator[str]:
    return (str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())


def _refusal(code: str, message: str, field: str) -> EngineFailed:
    return EngineFailed(Problem(code, message, "not_started", field=field))


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
