"""Adapters that a transformers engine has loaded, by name."""

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from threading import Lock

from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.option_checks import adapter_of
from rolloutbus.engine_worker.engine import LoraTensors
from rolloutbus.engine_worker.engines.shared.lora_adapter import read_adapter
from rolloutbus.engine_worker.engines.shared.step_loop import StepLoop
from rolloutbus.engine_worker.engines.transformers.lora_layers import LoadedAdapter, LoraLayers
from rolloutbus.engine_worker.features import unknown_adapter

ROOT_BYTES = 8


class AdapterSet:
    """Implements `LoraHost`.

    Requests keep the adapter that they began with: one that is replaced or forgotten is gone once
    the last of its requests has ended.
    """

    def __init__(self, layers: LoraLayers, loop: StepLoop) -> None:
        self._layers = layers
        self._loop = loop
        self._loading = Lock()
        self._adapters: dict[str, LoadedAdapter] = {}
        self._roots = count(1)

    def versions(self) -> Mapping[str, int]:
        """See `LoraHost`."""
        return {name: each.version for name, each in self._adapters.copy().items()}

    def load(self, name: str, version: int, source: Path | LoraTensors) -> None:
        """See `LoraHost`."""
        with self._loading:
            if self.versions().get(name) == version:
                return
            adapter = read_adapter(source, self._layers.shapes)
            root = next(self._roots).to_bytes(ROOT_BYTES, "little")
            self._adapters[name] = self._loop.call(
                lambda: self._layers.place(name, version, root, adapter)
            )

    def unload(self, name: str) -> None:
        """See `LoraHost`."""
        with self._loading:
            if self._adapters.pop(name, None) is None:
                raise ValueError(f"{name} is not loaded")

    def named(self, lora: str) -> LoadedAdapter | Problem | None:
        """The adapter that a request asks for; None: it asks for none."""
        named = adapter_of(lora) if lora else None
        if named is None:
            return None
        loaded = self._adapters.copy()
        versions = {name: each.version for name, each in loaded.items()}
        return unknown_adapter(lora, versions) or loaded[named[0]]
