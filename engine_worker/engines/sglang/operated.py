"""What an operator does with an SGLang engine besides generation and weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rolloutbus.bus.wire.messages.control import CacheTier
from rolloutbus.bus.wire.messages.engine import SaveKind, StartProfile
from rolloutbus.engine_worker.engine import MemoryFreed
from rolloutbus.engine_worker.engines.sglang.caches import Caches
from rolloutbus.engine_worker.engines.sglang.devices import Devices
from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread
from rolloutbus.engine_worker.engines.sglang.load import gauges_of
from rolloutbus.engine_worker.engines.sglang.memory import Memory
from rolloutbus.engine_worker.engines.sglang.pausing import Pausing
from rolloutbus.engine_worker.engines.sglang.profiler import Profiling
from rolloutbus.engine_worker.engines.sglang.saving import Saving
from rolloutbus.engine_worker.engines.shared.checkpoint_writer import Readable


@dataclass(frozen=True, slots=True)
class Operations:
    """The parts that do it."""

    caches: Caches
    memory: Memory
    profiling: Profiling
    saving: Saving
    thread: EngineThread
    timeout_s: float

    @classmethod
    def of(
        cls,
        thread: EngineThread,
        pausing: Pausing,
        weights: Readable,
        arguments: Mapping[str, Any],
        timeout_s: float,
    ) -> Self:
        """Those of an engine that was started.

        Args:
            thread: the engine's.
            pausing: its gate.
            weights: what is saved.
            arguments: SGLang's own, as they came out in the end.
            timeout_s: for a call to SGLang.
        """
        manager, devices = thread.engine.tokenizer_manager, Devices(arguments)
        caches = Caches(thread, manager, pausing, timeout_s, _tiers(arguments))
        return cls(
            caches,
            Memory(thread, manager, pausing, caches, devices, timeout_s),
            Profiling(thread, manager, timeout_s, has_gpu=devices.are_there),
            Saving(thread, pausing.guard, weights, Path(arguments["model_path"])),
            *(thread, timeout_s),
        )

    def load(self) -> dict[str, float]:
        """What the schedulers last told of themselves; they tell nothing while held."""
        manager = self.thread.engine.tokenizer_manager
        loads = self.thread.call(manager.get_loads, self.timeout_s, "get_loads")
        return gauges_of({each.dp_rank: each.to_dict() for each in loads})


class Operated:
    """What the SGLang engine inherits; it has `_operations`.

    Implements `MemoryTiers`, `PrefixCache`, `CacheTiers`, `Profiler`, `Checkpointer`, `LoadMeter`.
    """

    _operations: Operations

    def sleep(self, tags: Sequence[str]) -> MemoryFreed:
        """See `MemoryTiers`; what it raises: `Memory.sleep`."""
        return self._operations.memory.sleep(tags)

    def wake_up(self, tags: Sequence[str]) -> MemoryFreed:
        """See `MemoryTiers`; weights may come back as garbage: `Memory.wake_up`."""
        return self._operations.memory.wake_up(tags)

    def flush_cache(self) -> int:
        """See `PrefixCache`; EngineBusy while anything runs."""
        return self._operations.caches.flush()

    def flush_tiers(self, tiers: Sequence[CacheTier]) -> int:
        """See `CacheTiers`; EngineBusy while anything runs."""
        return self._operations.caches.flush_tiers(tiers)

    def start_profile(self, folder: Path, ask: StartProfile) -> None:
        """See `Profiler`."""
        self._operations.profiling.start(folder, ask)

    def stop_profile(self) -> None:
        """See `Profiler`."""
        self._operations.profiling.stop()

    def save_weights(self, destination: str, kind: SaveKind) -> None:
        """See `Checkpointer`."""
        self._operations.saving.save(destination, kind)

    def load(self) -> Mapping[str, float]:
        """See `LoadMeter`."""
        return self._operations.load()


def _tiers(arguments: Mapping[str, Any]) -> frozenset[str]:
    """Of the prefix cache."""
    tiers = {"device"}
    if arguments.get("enable_hierarchical_cache"):
        tiers.add("host")
        if arguments.get("hicache_storage_backend"):
            tiers.add("storage")
    return frozenset(tiers)
