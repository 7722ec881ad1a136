"""What the SGLang engine inherits so that its weights can be replaced and read."""

from collections.abc import Mapping, Sequence

from rolloutbus.engine_worker.engine import Bytes, InFlight, TensorRange, TensorSpec, WeightSwap
from rolloutbus.engine_worker.engines.sglang.weights import SglangWeights
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor
from rolloutbus.engine_worker.weights.transports.handle_book import HandleBook


class Updatable:
    """Implements `WeightSink`, `WeightSource`, `Stages` and `SharesMemory`."""

    def __init__(self, weights: SglangWeights) -> None:
        self._weights = weights

    def weight_specs(self) -> Sequence[TensorSpec]:
        """See `WeightSink`."""
        return self._weights.weight_specs()

    def install(
        self, version: int, tensors: Mapping[str, RawTensor], in_flight: InFlight
    ) -> WeightSwap:
        """See `WeightSink`; what it raises: `SglangWeights.install`."""
        return self._weights.install(version, tensors, in_flight)

    def read_ranges(self, ranges: Sequence[TensorRange]) -> tuple[int, list[Bytes]]:
        """See `WeightSource`; what it raises: `SglangWeights.read_ranges`."""
        return self._weights.read_ranges(ranges)

    def stage(self, version: int, tensors: Mapping[str, RawTensor]) -> None:
        """See `Stages`."""
        self._weights.stage(version, tensors)

    def unstage(self, version: int) -> None:
        """See `Stages`."""
        self._weights.unstage(version)

    @property
    def handles(self) -> HandleBook:
        """See `SharesMemory`."""
        return self._weights.handles

    def shared_buffer(self, size_bytes: int) -> Bytes:
        """See `SharesMemory`."""
        return self._weights.shared_buffer(size_bytes)
