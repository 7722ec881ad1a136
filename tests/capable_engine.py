"""The fake engine with every capability there is; what it gives is easily foretold.

It stands for engines in tests of the commands themselves, and shows nothing about real ones.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rolloutbus.bus.wire.messages.control import CacheTier
from rolloutbus.bus.wire.messages.engine import SaveKind, StartProfile
from rolloutbus.engine_worker.capabilities import Embeddings, LoraTensors, Scores
from rolloutbus.engine_worker.engine import Float32s, Int32s, MemoryFreed, Step
from rolloutbus.engine_worker.engines.fake.engine import FakeEngine
from rolloutbus.engine_worker.engines.fake.settings import FakeSettings
from rolloutbus.engine_worker.engines.shared.step_loop import EngineBusy


def ignore(_: Step) -> None:
    """Nobody reads the tokens."""


class CapableEngine(FakeEngine):
    """Implements all of `engine_worker.capabilities`."""

    def __init__(self) -> None:
        super().__init__(FakeSettings(), ignore)
        self.loaded: dict[str, int] = {}
        self.sources: list[Path | LoraTensors] = []
        self.flushed: list[CacheTier] = []
        self.saved: list[tuple[str, SaveKind]] = []
        self.fails_to_save = False
        self.reading = threading.Event()
        self.may_read = threading.Event()
        self.may_read.set()

    def sleep(self, tags: Sequence[str]) -> MemoryFreed:
        """See `MemoryTiers`."""
        if "cuda_graph" in tags:
            raise ValueError("this engine captures no graphs")
        return super().sleep(tags)

    def score(
        self,
        query: Int32s,
        items: Sequence[Int32s],
        label_token_ids: Sequence[int],
        *,
        apply_softmax: bool,
        item_first: bool,
    ) -> Scores:
        """Sum of query and item, plus the label; half of it with softmax, negative item first."""
        self.reading.set()
        self.may_read.wait()
        texts = [int(query.sum()) + int(item.sum()) for item in items]
        scores = np.add.outer(texts, list(label_token_ids)).astype(np.float32)
        scores *= (0.5 if apply_softmax else 1.0) * (-1.0 if item_first else 1.0)
        return Scores(scores, sum(len(query) + len(item) for item in items))

    def embed(self, inputs: Sequence[Int32s], dimensions: int) -> Embeddings:
        """(first token, sum of tokens, 0 ...), `dimensions` of them or 2; 13 cannot be embedded."""
        if any(each.sum() == 13 for each in inputs):
            raise ValueError("an unlucky input")
        d = dimensions or 2
        rows = np.zeros((len(inputs), max(d, 2)), np.float32)
        rows[:, 0] = [each[0] for each in inputs]
        rows[:, 1] = [each.sum() for each in inputs]
        return Embeddings(np.ascontiguousarray(rows[:, :d]), sum(map(len, inputs)))

    def rerank(self, pairs: Sequence[tuple[str, str]]) -> Float32s:
        """How many words they share."""
        shared = [len(set(query.split()) & set(text.split())) for query, text in pairs]
        return np.array(shared, np.float32)

    def adapters(self) -> Mapping[str, int]:
        """See `LoraHost`."""
        return self.loaded

    def load_lora(self, name: str, version: int, source: Path | LoraTensors) -> None:
        """See `LoraHost`."""
        self.sources.append(source)
        self.loaded[name] = version

    def unload_lora(self, name: str) -> None:
        """See `LoraHost`."""
        if self.loaded.pop(name, None) is None:
            raise ValueError(f"{name} is not loaded")

    def save_weights(self, destination: str, kind: SaveKind) -> None:
        """Two files of five bytes, one of them in a directory."""
        self.saved.append((destination, kind))
        if kind == "remote":
            return
        Path(destination, "a.safetensors").write_bytes(b"12345")
        if self.fails_to_save:
            raise OSError("no space left on the device")
        Path(destination, "more").mkdir()
        Path(destination, "more", "b.safetensors").write_bytes(b"12345")

    def start_profile(self, folder: Path, ask: StartProfile) -> None:
        """See `Profiler`."""
        if "TPU" in ask.activities:
            raise ValueError("no such activity: TPU")
        self._profile = folder

    def stop_profile(self) -> None:
        """See `Profiler`."""
        (self._profile / "trace.json").write_text("{}")

    def load(self) -> Mapping[str, float]:
        """See `LoadMeter`."""
        return {"n_running": 0.0, "usage": 0.25}

    def flush_tiers(self, tiers: Sequence[CacheTier]) -> int:
        """See `CacheTiers`."""
        if "storage" in tiers:
            raise EngineBusy("the storage is being written to")
        self.flushed += tiers
        return 7
