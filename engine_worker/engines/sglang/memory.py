"""What SGLang keeps in memory: its prefix cache by tier, and its sleep and wake by tag.

A sleeping engine's gate stays shut from before the first tag goes until the last one is back: a
request that reaches a scheduler without its KV cache ends the engine.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from rolloutbus.bus.wire.messages.control import CacheTier
from rolloutbus.engine_worker.engine import EngineBusy, MemoryFreed
from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread
from rolloutbus.engine_worker.engines.sglang.facts import Devices
from rolloutbus.engine_worker.engines.sglang.guard import KV_CACHE
from rolloutbus.engine_worker.engines.sglang.pausing import Pausing
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import CacheFlushed
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream

FLUSH_S = 5.0
"""For what runs to end, when nothing seems to run."""
COUNT_S = 2.0
"""From SGLang's answer until the scheduler's own message about what it flushed."""


def tiers_of(arguments: Mapping[str, Any]) -> frozenset[CacheTier]:
    """Of the prefix cache; `arguments`: SGLang's own, as they came out in the end."""
    if not arguments.get("enable_hierarchical_cache"):
        return frozenset({"device"})
    return frozenset(
        {"device", "host", "storage"}
        if arguments.get("hicache_storage_backend")
        else {"device", "host"}
    )


class Caches:
    """Implements `PrefixCache`; calls come from any thread but the engine's."""

    def __init__(
        self,
        thread: EngineThread,
        pausing: Pausing,
        tiers: frozenset[CacheTier],
        n_replicas: int,
    ) -> None:
        """`n_replicas`: each has a cache."""
        self._n_replicas = n_replicas
        self._thread = thread
        self._pausing = pausing
        self.tiers = tiers
        self._flushed: SimpleQueue[CacheFlushed] = SimpleQueue()
        self.on_flushed = self._flushed.put
        """To be called with each message that a scheduler has flushed."""

    def flush_all(self) -> int:
        """Forget every cached prefix of device and host; returns how many tokens.

        Raises:
            EngineBusy: SGLang can only do it while nothing runs.
        """
        pausing = self._pausing
        with pausing.lock:
            guard = pausing.guard
            guard.check_flush(pausing.n_live)
            if KV_CACHE in guard.released:  # they went with it
                return 0
            if guard.state in ("held", "retracted"):
                pausing.settle()
            # Behind a shut gate nothing can end, and there is nothing to wait for.
            return self._flush(FLUSH_S if guard.state in ("running", "settled") else None)

    def flush(self, tiers: Sequence[CacheTier]) -> int:
        """See `PrefixCache`; `device` and `host` are flushed together, as by `flush_all`."""
        n_tokens = self.flush_all() if {"device", "host"} & set(tiers) else 0
        if "storage" in tiers:
            clear = self._thread.manager.clear_hicache_storage
            if not self._thread.call(clear, "clear_hicache_storage").success:
                raise EngineBusy("SGLang has not cleared its storage; see its log")
        return n_tokens

    def _flush(self, patience_s: float | None) -> int:
        while not self._flushed.empty():
            self._flushed.get_nowait()
        manager = self._thread.manager
        answer = self._thread.call(lambda: manager.flush_cache(timeout_s=patience_s), "flush_cache")
        if not answer.success:
            why = getattr(answer, "message", "") or "it is busy"
            raise EngineBusy(f"SGLang has not flushed its cache: {why}")
        n_tokens = n_flushed = 0
        try:  # SGLang's answer is that of one replica
            for _ in range(self._n_replicas):
                n_tokens += self._flushed.get(timeout=COUNT_S).n_tokens
                n_flushed += 1
        except Empty:
            if self._n_replicas > 1:
                of = f"{n_flushed} of {self._n_replicas} replicas"
                raise EngineBusy(f"SGLang has flushed the caches of {of} only") from None
        return n_tokens


class SglangMemory:
    """Implements `MemoryTiers`; calls come from any thread but the engine's."""

    def __init__(
        self, thread: EngineThread, pausing: Pausing, caches: Caches, devices: Devices
    ) -> None:
        self._thread = thread
        self._pausing = pausing
        self._caches = caches
        self._devices = devices

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
        act: Callable[..., Coroutine[Any, Any, None]] = getattr(self._thread.manager, name)
        request = upstream.request(kind, tags=[tag])
        self._thread.call(lambda: act(request, None), name)
