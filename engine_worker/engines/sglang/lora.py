"""Adapters in SGLang: each under a name of its own there, and unloaded after its last request.

SGLang would load an adapter that was unloaded again, from where it came from, when a request names
it, and unload another one when there are too many. So it is never asked for one that is not loaded,
nor to load one too many, and no name is ever used twice.
"""

import json
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from rolloutbus.bus.weights.manifest import lay_out
from rolloutbus.bus.weights.tensor_files import header_of
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.validation import adapter_of
from rolloutbus.engine_worker.engine import LoraTensors, TensorSpec
from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread
from rolloutbus.engine_worker.engines.sglang.requests import Unfit
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.types import SglangObject
from rolloutbus.engine_worker.engines.shared.lora_adapter import (
    PREFIX,
    A,
    Adapter,
    B,
    Factors,
    Shape,
    read_adapter,
)
from rolloutbus.engine_worker.features import unknown_adapter
from rolloutbus.engine_worker.weights.adapter_sources import CONFIG, TENSORS
from rolloutbus.engine_worker.weights.torch_tensors import DTYPE_NAMES

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that SGLang runs as one, and looks for together."""


def write_adapter(adapter: Adapter, shapes: Mapping[str, Shape], folder: Path) -> None:
    """Write an adapter in PEFT's layout.

    Args:
        adapter: of the model.
        shapes: (out, in) of each of its linear modules, by name.
        folder: an empty directory.
    """
    modules = completed(adapter, shapes)
    config = {
        "peft_type": "LORA",
        "r": adapter.rank,
        # SGLang knows one way to make a scale of it.
        "lora_alpha": adapter.scale * adapter.rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "bias": "none",
    }
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    tensors = {
        f"{PREFIX}{module}{suffix}": tensor
        for module, factors in modules.items()
        for suffix, tensor in zip((A, B), factors, strict=True)
    }
    layout = lay_out(
        (name, DTYPE_NAMES[each.dtype], tuple(each.shape)) for name, each in tensors.items()
    )
    with (folder / TENSORS).open("wb") as file:
        file.write(header_of(layout))
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def completed(adapter: Adapter, shapes: Mapping[str, Shape]) -> Mapping[str, Factors]:
    """The adapted modules, and with factors of zero those that are fused with them.

    SGLang fails on an adapter of some of them, or forgets it.
    """
    found = dict(adapter.modules)
    for module, factors in adapter.modules.items():
        parent, _, leaf = module.rpartition(".")
        for group in FUSED:
            for other in group if leaf in group else ():
                name = f"{parent}.{other}"
                if name in shapes and name not in found:
                    n_out, n_in = shapes[name]
                    dtype = factors.a.dtype
                    a = torch.zeros(adapter.rank, n_in, dtype=dtype)
                    found[name] = Factors(a, torch.zeros(n_out, adapter.rank, dtype=dtype))
    return found


LEAVING_S = 5.0
"""One that is replaced or unloaded has left after this time, unless a long request uses it."""
MATRIX = 2
"""Dimensions of a weight that can be adapted."""


@dataclass(slots=True, eq=False)
class _Loaded:
    """One that SGLang has."""

    version: int
    key: str
    """SGLang's name of it."""
    n_requests: int = 0
    is_wanted: bool = True
    """New requests may get it."""


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """What SGLang was started with."""

    is_on: bool
    max_rank: int
    max_loaded: int | None
    is_spread: bool
    """Over ranks that SGLang loads no adapter on, or that do not see our files."""

    @property
    def are_possible(self) -> bool:
        """Whether adapters can be loaded at all."""
        return self.is_on and not self.is_spread

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "LoraLimits":
        """`arguments`: SGLang's own, as they came out in the end."""
        return cls(
            is_on=bool(arguments.get("enable_lora")),
            max_rank=int(arguments.get("max_lora_rank") or 0),
            max_loaded=arguments.get("max_loaded_loras"),
            is_spread=int(arguments["dp_size"]) > 1 or int(arguments["nnodes"]) > 1,
        )


class LoraAdapters:
    """Implements `LoraHost`; calls come from any thread, `load` from any but the engine's."""

    def __init__(
        self,
        thread: EngineThread,
        weights: Sequence[TensorSpec],
        limits: LoraLimits,
    ) -> None:
        """`weights`: of the model's checkpoint."""
        self._thread = thread
        self._manager: SglangObject = thread.manager
        self._shapes = _shapes(weights)
        self._limits = limits
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        """Of what follows."""
        self._one_left = threading.Condition(self._lock)
        self._by_name: dict[str, _Loaded] = {}
        self._by_rid: dict[str, _Loaded] = {}
        self._n_there = 0
        """In SGLang, those included that only wait for their last request."""
        self._numbers = count(1)

    def versions(self) -> dict[str, int]:
        """Of those that new requests may use."""
        with self._lock:
            return self._versions()

    def load(self, name: str, version: int, source: Path | LoraTensors) -> None:
        """See `LoraHost`. EngineFailed: not in this engine."""
        with self._loading:
            if self.versions().get(name) == version:
                return
            self._check_room()
            adapter = read_adapter(source, self._shapes)
            if adapter.rank > self._limits.max_rank:
                limit = f"this engine's `max_lora_rank` is {self._limits.max_rank}"
                raise ValueError(f"an adapter of rank {adapter.rank}: {limit}")
            key = f"{name}@{version}.{next(self._numbers)}"
            with tempfile.TemporaryDirectory(prefix="rolloutbus-lora-") as folder:
                write_adapter(adapter, self._shapes, Path(folder))
                self._load(key, folder)
            with self._lock:
                self._n_there += 1
                before = self._by_name.get(name)
                self._by_name[name] = _Loaded(version, key)
                self._retire(before)

    def unload(self, name: str) -> None:
        """See `LoraHost`; returns at once, also if requests use it."""
        with self._lock:
            found = self._by_name.pop(name, None)
            if found is None:
                raise ValueError(f"{name} is not loaded")
            self._retire(found)

    def begin(self, rid: str, lora: str) -> str:
        """SGLang's name of the adapter that a request asks for, which stays until `end`.

        Raises:
            Unfit: it is not loaded.
        """
        named = adapter_of(lora) if lora else None
        if named is None:
            return ""
        with self._lock:
            problem = unknown_adapter(lora, self._versions())
            if problem is not None:
                raise Unfit(problem)
            found = self._by_name[named[0]]
            found.n_requests += 1
            self._by_rid[rid] = found
        return found.key

    def end(self, rid: str) -> None:
        """SGLang has no such request any more. Idempotent."""
        with self._lock:
            found = self._by_rid.pop(rid, None)
            if found is not None:
                found.n_requests -= 1
                self._unload_unused(found)

    def _versions(self) -> dict[str, int]:
        return {name: each.version for name, each in self._by_name.items()}

    def _check_room(self) -> None:
        limits = self._limits
        why = ""
        if not limits.is_on:
            why = "SGLang applies no adapters unless it is started with `enable_lora`"
        elif limits.is_spread:
            why = "SGLang loads no adapters over several nodes or data parallel ranks"
        if why:
            raise EngineFailed(Problem("unsupported", why, "not_started"))
        if limits.max_loaded is None:
            return
        with self._one_left:
            if self._n_there > len(self._by_name):
                self._one_left.wait_for(lambda: self._has_room, LEAVING_S)
            if not self._has_room:
                raise ValueError(
                    f"{self._n_there} adapters are there, of `max_loaded_loras` "
                    f"{limits.max_loaded}: to replace one takes room for one more, and one that "
                    "was unloaded stays until the last of its requests has ended"
                )

    @property
    def _has_room(self) -> bool:
        limit = self._limits.max_loaded
        return limit is None or self._n_there < limit

    def _load(self, key: str, folder: str) -> None:
        ask = upstream.request("LoadLoRAAdapterReqInput", lora_name=key, lora_path=folder)
        load = self._manager.load_lora_adapter
        answer = self._thread.call(lambda: load(ask, None), "load_lora_adapter")
        if not answer.success:
            raise ValueError(f"SGLang does not take it: {answer.error_message}"[:500])

    def _retire(self, loaded: _Loaded | None) -> None:
        """Under the lock."""
        if loaded is not None:
            loaded.is_wanted = False
            self._unload_unused(loaded)

    def _unload_unused(self, loaded: _Loaded) -> None:
        """Under the lock."""
        if not loaded.is_wanted and not loaded.n_requests:
            self._thread.begin(lambda: self._unload(loaded.key))

    async def _unload(self, key: str) -> None:
        # SGLang's own count of requests is left too high by some of its errors: its unloading would
        # never end then, and no adapter could be loaded any more. So ours counts.
        manager = self._manager
        async with manager.lora_update_lock:
            lora_id = await manager.lora_registry.unregister(key)
            manager.lora_ref_cache.pop(key, None)
            ask = upstream.request("UnloadLoRAAdapterReqInput", lora_name=key, lora_id=lora_id)
            await manager.update_lora_adapter_communicator(ask)
        with self._one_left:
            self._n_there -= 1
            self._one_left.notify_all()


def full_name(key: str) -> str:
    """`NAME@VERSION` of an adapter, from SGLang's name of it."""
    return key.rpartition(".")[0]


def _shapes(weights: Sequence[TensorSpec]) -> Mapping[str, Shape]:
    return {
        spec.name.removesuffix(".weight"): spec.shape
        for spec in weights
        if spec.name.endswith(".weight") and len(spec.shape) == MATRIX and "embed" not in spec.name
    }
