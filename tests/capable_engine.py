"""The fake engine with every part there is; what it gives is easily foretold.

It stands for engines in tests of the commands themselves, and shows nothing about real ones.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rolloutbus.bus.wire.messages.control import CacheTier, SaveKind, StartProfile
from rolloutbus.engine_worker.engine import (
    EmbeddingRows,
    EngineBusy,
    Float32s,
    Int32s,
    LoraTensors,
    MemoryFreed,
    ScoreRows,
    Step,
)
from rolloutbus.engine_worker.engines.fake.engine import FakeEngine, FakeMemory
from rolloutbus.engine_worker.engines.fake.settings import FakeSettings


def ignore(_: Step) -> None:
    """Nobody reads the tokens."""


class GraphlessMemory(FakeMemory):
    """It has no tag `cuda_graph`."""

    def sleep(self, tags: Sequence[str]) -> MemoryFreed:
        """See `MemoryTiers`."""
        if "cuda_graph" in tags:
            raise ValueError("this engine captures no graphs")
        return super().sleep(tags)


class TieredCache:
    """Implements `PrefixCache`; seven tokens are in it each time."""

    tiers: Sequence[CacheTier] = ("device", "host", "storage")

    def __init__(self) -> None:
        self.flushed: list[CacheTier] = []

    def flush(self, tiers: Sequence[CacheTier]) -> int:
        """See `PrefixCache`."""
        if "storage" in tiers:
            raise EngineBusy("the storage is being written to")
        self.flushed += tiers
        return 7


class Reader:
    """Implements `Scorer`, `Embedder` and `Reranker`."""

    def __init__(self) -> None:
        self.reading = threading.Event()
        self.may_read = threading.Event()
        self.may_read.set()

    def score(
        self,
        query: Int32s,
        items: Sequence[Int32s],
        label_token_ids: Sequence[int],
        *,
        apply_softmax: bool,
        item_first: bool,
    ) -> ScoreRows:
        """Sum of query and item, plus the label; half of it with softmax, negative item first."""
        self.reading.set()
        self.may_read.wait()
        texts = [int(query.sum()) + int(item.sum()) for item in items]
        scores = np.add.outer(texts, list(label_token_ids)).astype(np.float32)
        scores *= (0.5 if apply_softmax else 1.0) * (-1.0 if item_first else 1.0)
        return ScoreRows(scores, sum(len(query) + len(item) for item in items))

    def embed(self, inputs: Sequence[Int32s], dimensions: int) -> EmbeddingRows:
        """(first token, sum of tokens, 0 ...), `dimensions` of them or 2; 13 cannot be embedded."""
        if any(each.sum() == 13 for each in inputs):
            raise ValueError("an unlucky input")
        d = dimensions or 2
        rows = np.zeros((len(inputs), max(d, 2)), np.float32)
        rows[:, 0] = [each[0] for each in inputs]
        rows[:, 1] = [each.sum() for each in inputs]
        return EmbeddingRows(np.ascontiguousarray(rows[:, :d]), sum(map(len, inputs)))

    def rerank(self, pairs: Sequence[tuple[str, str]]) -> Float32s:
        """How many words they share."""
        shared = [len(set(query.split()) & set(text.split())) for query, text in pairs]
        return np.array(shared, np.float32)


class AnyAdapters:
    """Implements `LoraHost`: whatever is loaded fits."""

    def __init__(self) -> None:
        self.sources: list[Path | LoraTensors] = []
        self._loaded: dict[str, int] = {}

    def versions(self) -> Mapping[str, int]:
        """See `LoraHost`."""
        return self._loaded

    def load(self, name: str, version: int, source: Path | LoraTensors) -> None:
        """See `LoraHost`."""
        self.sources.append(source)
        self._loaded[name] = version

    def unload(self, name: str) -> None:
        """See `LoraHost`."""
        if self._loaded.pop(name, None) is None:
            raise ValueError(f"{name} is not loaded")


class TwoFiles:
    """Implements `Checkpointer`: two files of five bytes, one of them in a directory."""

    def __init__(self) -> None:
        self.saved: list[tuple[str, SaveKind]] = []
        self.fails = False

    def save(self, destination: str, kind: SaveKind) -> None:
        """See `Checkpointer`."""
        self.saved.append((destination, kind))
        if kind == "remote":
            return
        Path(destination, "a.safetensors").write_bytes(b"12345")
        if self.fails:
            raise OSError("no space left on the device")
        Path(destination, "more").mkdir()
        Path(destination, "more", "b.safetensors").write_bytes(b"12345")


class EmptyTraces:
    """Implements `Profiler`."""

    def start(self, folder: Path, ask: StartProfile) -> None:
        """See `Profiler`."""
        if "TPU" in ask.activities:
            raise ValueError("no such activity: TPU")
        self._folder = folder

    def stop(self) -> None:
        """See `Profiler`."""
        (self._folder / "trace.json").write_text("{}")


class SteadyMeter:
    """Implements `LoadMeter`."""

    def load(self) -> Mapping[str, float]:
        """See `LoadMeter`."""
        return {"n_running": 0.0, "usage": 0.25}


class CapableEngine(FakeEngine):
    """Implements `Engine`."""

    def __init__(self) -> None:
        super().__init__(FakeSettings(), ignore)
        self.memory = GraphlessMemory(self._loop)
        self.cache = TieredCache()
        self.lora = AnyAdapters()
        self.reader = self.scorer = self.embedder = self.reranker = Reader()
        self.checkpointer = TwoFiles()
        self.profiler = EmptyTraces()
        self.meter = SteadyMeter()
