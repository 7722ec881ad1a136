"""Sleep and wake: SGLang's memory given to others by tag, and taken back.

Its gate stays shut from before the first tag goes until the last one is back: a request that
reaches a scheduler without its KV cache ends the engine.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rolloutbus.engine_worker.engine import MemoryFreed
from rolloutbus.engine_worker.engines.sglang.caches import Caches
from rolloutbus.engine_worker.engines.sglang.devices import Devices
from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread
from rolloutbus.engine_worker.engines.sglang.pausing import Pausing
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.types import TokenizerManager


class SglangMemory:
    """Implements `MemoryTiers`; calls come from any thread but the engine's."""

    def __init__(
        self,
        thread: EngineThread,
        manager: TokenizerManager,
        pausing: Pausing,
        caches: Caches,
        devices: Devices,
        timeout_s: float,
    ) -> None:
        self._thread = thread
        self._manager = manager
        self._pausing = pausing
        self._caches = caches
        self._devices = devices
        self._timeout_s = timeout_s

    def sleep(self, tags: Sequence[str]) -> MemoryFreed:
        """See `MemoryTiers`: what the driver has more of afterwards, per tag.

        Raises:
            ValueError: there is no such tag.
            EngineFailed: the weights are not this engine's to give.
            EngineBusy: requests are in the engine, or its weights are being changed.
        """
        pausing = self._pausing
        with pausing.lock:
            guard = pausing.guard
            due = guard.check_release(tags, pausing.n_live)
            freed = dict.fromkeys(tags, 0)
            if not due:
                return MemoryFreed(freed)
            pausing.settle()
            try:
                self._caches.flush_all()
                for tag in due:
                    before = self._devices.used_bytes()
                    self._call("release", tag)
                    guard.released.add(tag)
                    freed[tag] = max(0, before - self._devices.used_bytes())
            finally:  # if it was refused on the way, the gate has no reason to be shut
                pausing.lift("")
        return MemoryFreed(freed)

    def wake_up(self, tags: Sequence[str]) -> MemoryFreed:
        """See `MemoryTiers`. Weights that SGLang keeps no copy of come back torn.

        Raises:
            ValueError: there is no such tag.
        """
        pausing = self._pausing
        with pausing.lock:
            guard = pausing.guard
            taken = dict.fromkeys(tags, 0)
            for tag in guard.check_take_back(tags):
                before = self._devices.used_bytes()
                self._call("resume", tag)
                guard.took_back(tag)
                taken[tag] = max(0, self._devices.used_bytes() - before)
            pausing.lift("")
        return MemoryFreed(taken)

    def _call(self, verb: str, tag: str) -> None:
        name = f"{verb}_memory_occupation"
        kind = f"{verb.capitalize()}MemoryOccupationReqInput"
        act: Callable[..., Coroutine[Any, Any, None]] = getattr(self._manager, name)
        request = upstream.request(kind, tags=[tag])
        self._thread.call(lambda: act(request, None), self._timeout_s, name)
