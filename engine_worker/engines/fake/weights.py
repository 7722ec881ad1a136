"""The weights of the fake engine: two small tensors that nothing is computed with."""

from collections.abc import Mapping

import numpy as np

from rolloutbus.engine_worker.engine import Bytes, TensorSpec
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor

FAKE_SPECS = (
    TensorSpec("embed.weight", "F32", (8, 4), 128),
    TensorSpec("head.weight", "F32", (4,), 16),
)


class FakeWeights:
    """Implements `WeightMemory`: zeros at first."""

    specs = FAKE_SPECS
    are_aside = False

    def __init__(self) -> None:
        self._held = {spec.name: np.zeros(spec.size_bytes, np.uint8) for spec in FAKE_SPECS}

    @property
    def content(self) -> Mapping[str, bytes]:
        """Tensor -> its bytes."""
        return {name: held.tobytes() for name, held in self._held.items()}

    def write(self, name: str, offset: int, raw: RawTensor) -> None:
        """See `WeightMemory`."""
        self._held[name][offset : offset + raw.nbytes] = np.asarray(raw)

    def read(self, name: str, offset: int, size_bytes: int) -> Bytes:
        """See `WeightMemory`."""
        return self._held[name][offset : offset + size_bytes].copy()

    def settle(self) -> None:
        """Nothing is written by anybody else."""
