"""The weights that an engine samples with: replaced, read and overwritten between its steps.

How a kind of engine keeps its tensors is left to a `WeightMemory`.
"""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rolloutbus.engine_worker.engine import (
    Bytes,
    EngineBusy,
    InFlight,
    TensorRange,
    TensorSpec,
    WeightSwap,
)
from rolloutbus.engine_worker.engines.shared.step_loop import TORN, StepLoop, Stepper
from rolloutbus.engine_worker.weights.checks import require_bytes
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor

if TYPE_CHECKING:  # it imports torch, which takes seconds and not every engine needs
    from rolloutbus.engine_worker.weights.torch_tensors import DeviceCopies


class WeightMemory(Protocol):
    """Tensors by name. Only the loop's thread calls it, or any thread while the loop is torn."""

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """All tensors."""
        ...

    @property
    def are_aside(self) -> bool:
        """Whether they are where no step can use them."""
        ...

    def write(self, name: str, offset: int, raw: RawTensor) -> None:
        """Overwrite a tensor's bytes from `offset` on."""
        ...

    def read(self, name: str, offset: int, size_bytes: int) -> Bytes:
        """Copy of a tensor's bytes, uint8 [size_bytes]."""
        ...

    def settle(self) -> None:
        """Return when all that was written is there, on a device too."""
        ...


class LiveWeights:
    """Implements `WeightSink` and `InPlaceSink`."""

    def __init__(
        self,
        memory: WeightMemory,
        batch: Stepper,
        loop: StepLoop,
        copies: "DeviceCopies | None" = None,
    ) -> None:
        """`copies`: where versions are put that are staged, if that is of use."""
        self._copies = copies
        self._installing: set[int] = set()
        """Versions whose copies are read soon."""
        self._memory = memory
        self._batch = batch
        self._loop = loop
        self._specs = {spec.name: spec for spec in memory.specs}
        self._torn_at = 0.0
        """When steps stopped for the overwriting under way."""
        self._cost = (0, 0)
        """Requests retracted and aborted for it."""

    def specs(self) -> Sequence[TensorSpec]:
        """See `WeightSink`."""
        return self._memory.specs

    def install(
        self, version: int, tensors: Mapping[str, RawTensor], in_flight: InFlight
    ) -> WeightSwap:
        """See `WeightSink`.

        `abort` ends running requests and leaves queued ones, which start on the new weights.

        Raises:
            ValueError: tensors do not fit, by name; nothing was touched.
            EngineBusy: the weights are asleep, or `finish_old` was asked for while halted with
                requests running, which would never end.
        """
        require_bytes(self._specs, tensors)
        nearest = dict(tensors)
        if self._copies is not None:
            nearest |= self._copies.of(version)
        self._installing.add(version)
        try:
            return self._loop.call(
                lambda: self._swap(version, nearest, in_flight), when_idle=in_flight == "finish_old"
            )
        finally:
            self._installing.discard(version)
            self.unstage(version)

    def stage(self, version: int, tensors: Mapping[str, RawTensor]) -> None:
        """See `WeightSink`."""
        require_bytes(self._specs, tensors)
        if self._copies is not None:
            far = {name: raw for name, raw in tensors.items() if isinstance(raw, np.ndarray)}
            self._copies.stage(version, far)

    def unstage(self, version: int) -> None:
        """See `WeightSink`. An install that has begun to wait goes on."""
        if self._copies is not None and version not in self._installing:
            self._copies.drop(version)

    def give_back_spares(self) -> None:
        """See `WeightSink`."""
        if self._copies is not None:
            self._copies.give_back_spare()

    def read_ranges(self, ranges: Sequence[TensorRange]) -> tuple[int, list[Bytes]]:
        """See `WeightSource`."""
        for each in ranges:
            self._require(each)
        return self._loop.call(
            lambda: (self._whole_version(), [self._memory.read(*each) for each in ranges])
        )

    def begin_overwrite(self, in_flight: InFlight) -> None:
        """See `InPlaceSink`.

        Raises:
            EngineBusy: as of `install`; the weights are whole.
        """
        self._loop.call(lambda: self._tear(in_flight), when_idle=in_flight == "finish_old")

    def overwrite(self, name: str, offset: int, raw: RawTensor) -> None:
        """See `InPlaceSink`."""
        self._require(TensorRange(name, offset, raw.nbytes))
        self._memory.write(name, offset, raw)

    def overwritten(self, name: str, offset: int, size_bytes: int) -> Bytes:
        """See `InPlaceSink`."""
        self._require(TensorRange(name, offset, size_bytes))
        return self._memory.read(name, offset, size_bytes)

    def end_overwrite(self, version: int) -> WeightSwap:
        """See `InPlaceSink`."""
        return self._loop.call(lambda: self._mend(version, self._torn_at, *self._cost))

    def _swap(
        self, version: int, tensors: Mapping[str, RawTensor], in_flight: InFlight
    ) -> WeightSwap:
        began = time.perf_counter()
        cost = self._make_way(in_flight)
        for name, raw in tensors.items():
            self._memory.write(name, 0, raw)
        return self._mend(version, began, *cost)

    def _tear(self, in_flight: InFlight) -> None:
        began = time.perf_counter()
        self._cost = self._make_way(in_flight)
        self._torn_at = began
        self._loop.halt(TORN)

    def _mend(self, version: int, began: float, n_retracted: int, n_aborted: int) -> WeightSwap:
        self._memory.settle()
        self._batch.change_weights(version)
        self._loop.lift(TORN)
        stall_ms = (time.perf_counter() - began) * 1e3
        return WeightSwap(version, stall_ms, n_retracted, n_aborted)

    def _make_way(self, in_flight: InFlight) -> tuple[int, int]:
        """Do with running requests as asked; how many were retracted and aborted."""
        if self._memory.are_aside:
            raise EngineBusy("the weights are asleep: wake them up before an update")
        match in_flight:
            case "abort":
                return 0, self._loop.end_running()
            case "retract":
                return self._loop.retract(), 0
            case "keep":
                # A request's first run of tokens tells which weights its prompt's KV is of, so
                # a prompt that is half computed starts again.
                self._loop.retract(without_tokens_only=True)
            case "finish_old":
                if self._batch.n_running:
                    raise EngineBusy("halted with requests running: finish_old would never end")
        return 0, 0

    def require_usable(self) -> None:
        """Whether a forward pass may use them now; on the loop only.

        Raises:
            EngineBusy: it may not.
        """
        self._whole_version()
        if self._memory.are_aside:
            raise EngineBusy("the weights are asleep: wake them up first")

    def _whole_version(self) -> int:
        if self._loop.is_torn:
            raise EngineBusy("the weights are half overwritten: they are of no version")
        return self._batch.version

    def _require(self, asked: TensorRange) -> None:
        name, offset, size_bytes = asked
        if name not in self._specs:
            raise ValueError(f"there is no tensor {name!r}")
        held = self._specs[name].size_bytes
        if not 0 <= offset <= offset + size_bytes <= held:
            raise ValueError(f"tensor {name!r} has {held} bytes, not {offset} + {size_bytes}")
