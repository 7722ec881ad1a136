"""The model of one scheduler process: what of its checkpoint it keeps, overwritten and read."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed
from msgspec import structs

from rolloutbus.bus.weights.cuda_memory import CudaError
from rolloutbus.bus.wire.codec import runs_within
from rolloutbus.engine_worker.engines.sglang.inside.checkpoint_map import CheckpointMap
from rolloutbus.engine_worker.engines.sglang.inside.staging import (
    MappedFiles,
    NamedTensors,
    Staging,
)
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    CheckpointTensor,
    FindTensors,
    Read,
    SchedulerAnswer,
    Stage,
)
from rolloutbus.engine_worker.engines.sglang.upstream.types import ModelRunner

T = TypeVar("T")


class Ranks:
    """Scheduler processes that hold something between them."""

    def __init__(self, group: Any) -> None:  # noqa: ANN401 - torch has no type for it
        """`group`: of PyTorch, for objects of the host."""
        self._group = group
        self.n: int = torch.distributed.get_world_size(group)

    def gathered(self, mine: T) -> list[T]:
        """What each rank has here, in their order; returns once all have come."""
        if self.n == 1:
            return [mine]
        of_all: list[Any] = [None] * self.n
        cast("Any", torch.distributed).all_gather_object(of_all, mine, group=self._group)  # untyped
        return of_all


BATCH_BYTES = 512 * 1024 * 1024
"""Brought to the GPU at a time, where there was no room for the whole version."""


class OverwriteOutcome(NamedTuple):
    """Of overwriting the model, on all ranks together."""

    problem: str
    """Why it is not the new version; empty: it is."""
    is_torn: bool
    """It is of no version now."""


class ModelTensors:
    """Reads and writes one rank's part of the model; between steps, but for `stage`."""

    def __init__(
        self,
        runner: ModelRunner,
        ranks: Ranks,
        everyone: Ranks,
        is_computing: Callable[[], bool],
    ) -> None:
        """Until `survey` nothing is known of the checkpoint.

        Args:
            runner: SGLang's, of this process.
            ranks: those that hold these layers between them.
            everyone: those that hold the model between them, with all its layers.
            is_computing: whether requests run that `stage` is not to hold up; asked in any thread.
        """
        self._runner = runner
        self._ranks = ranks
        self._everyone = everyone
        self._device = next(iter(runner.model.parameters())).device
        self._staging = Staging(self._device, is_computing)
        self._answers = MappedFiles()
        self._map: CheckpointMap | None = None
        self.is_torn = False
        """The weights are of no version."""

    def survey(self, order: FindTensors) -> SchedulerAnswer:
        """See `FindTensors`. What cannot be made out can still be overwritten, but not be read."""
        try:
            self._map = CheckpointMap(self._runner.model, order.tensors)
        except Exception:  # noqa: BLE001 - a model's own code, which expects weights with content
            self._map = None
        # All ranks run the same code, but none may wait for another that has failed.
        if not all(self._ranks.gathered(self._map is not None)) or self._map is None:
            return _unknown(order.tensors)
        held = self._map
        names = [each.name for each in order.tensors]
        of_all = self._ranks.gathered({name: held.sources(name) for name in names})
        parts = {name: {part for rank in of_all for part in rank[name]} for name in names}
        sizes = {name: sum(prod(part.shape) for part in parts[name]) for name in names}
        return SchedulerAnswer(
            dtypes=[held.dtype(name) for name in names],
            unreadable=[e.name for e in order.tensors if sizes[e.name] != prod(e.shape)],
            unfilled=held.unfilled,
        )

    def stage(self, order: Stage) -> str:
        """Bring a version near; in any thread. Why that failed; empty: it is there."""
        try:
            self._staging.stage(self._of_use(order))
        except (OSError, ValueError, KeyError, RuntimeError, CudaError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _of_use(self, order: Stage) -> Stage:
        """The order without tensors of other stages."""
        held = self._map
        if held is None:
            return order
        return structs.replace(
            order,
            tensors=[each for each in order.tensors if held.dtype(each.tensor.name)],
            lent=[each for each in order.lent if held.dtype(each.tensor.name)],
        )

    def has(self, version: int) -> bool:
        """Whether a version is staged."""
        return self._staging.tensors(version) is not None

    def drop(self, version: int) -> None:
        """Forget a staged version. Idempotent."""
        self._staging.drop(version)

    def give_back_spares(self) -> None:
        """Give back memory of the device that is kept for the next version."""
        self._staging.give_back_spares()

    def overwrite(self, version: int) -> OverwriteOutcome:
        """Make a staged version the active one."""
        module = torch.get_device_module(self._device)
        module.synchronize()  # the last step may still use what is there
        was_torn, problem, is_torn = self.is_torn, "", False
        try:
            problem = self._load(self._staging.tensors(version) or [])
        except Exception as error:  # noqa: BLE001 - whatever it is, SGLang would die of it
            problem, is_torn = f"{type(error).__name__}: {error}"[:500], True
        module.synchronize()
        outcomes = self._everyone.gathered((problem, is_torn))
        problem = next((each for each, _ in outcomes if each), "")
        # One rank that failed spoils what the others have taken.
        is_spoiled = any(torn or not why for why, torn in outcomes)
        self.is_torn = bool(problem) and (was_torn or is_spoiled)
        return OverwriteOutcome(problem, self.is_torn)

    def read(self, order: Read) -> None:
        """Write what is asked for into the host's file."""
        if not order.rows:
            return
        assert self._map is not None, "the host asks for nothing that is unreadable"
        content = torch.as_tensor(self._answers.of(order.file, for_writing=True))
        for rows in order.rows:
            self._map.read(rows, content[rows.offset :])

    def _load(self, tensors: NamedTensors) -> str:
        updater = self._runner.weight_updater
        begin = getattr(updater, "begin_weight_update", None)
        if begin is not None:
            begin()
        try:
            for batch in _batches(tensors, self._device):
                success, message = updater.update_weights_from_tensor(
                    named_tensors=batch, load_format=None
                )
                if not success:
                    return str(message)
        finally:
            if begin is not None:
                updater.end_weight_update(run_post_load=False)
        return ""


def _unknown(tensors: Sequence[CheckpointTensor]) -> SchedulerAnswer:
    return SchedulerAnswer(
        dtypes=[each.dtype for each in tensors], unreadable=[each.name for each in tensors]
    )


def _batches(tensors: NamedTensors, device: torch.device) -> list[NamedTensors]:
    """All at once, unless they are not yet where the model is: that takes memory for a copy."""
    if all(tensor.device.type == device.type for _, tensor in tensors):
        return [tensors]
    return runs_within(BATCH_BYTES, tensors, lambda each: each[1].nbytes)
