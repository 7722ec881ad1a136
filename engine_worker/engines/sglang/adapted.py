"""What the SGLang engine inherits so that requests can name adapters."""

from collections.abc import Mapping
from pathlib import Path

from rolloutbus.engine_worker.capabilities import LoraTensors
from rolloutbus.engine_worker.engines.sglang.lora import LoraAdapters


class Adapted:
    """Implements `LoraHost` for an engine that has `_lora`."""

    _lora: LoraAdapters

    def adapters(self) -> Mapping[str, int]:
        """See `LoraHost`."""
        return self._lora.versions()

    def load_lora(self, name: str, version: int, source: Path | LoraTensors) -> None:
        """See `LoraHost`; what else it raises: `LoraAdapters.load`."""
        self._lora.load(name, version, source)

    def unload_lora(self, name: str) -> None:
        """See `LoraHost`."""
        self._lora.unload(name)
