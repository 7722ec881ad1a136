"""A scheduler process sees the bytes that the engine host has staged."""

# pyright: reportUnknownMemberType=false
# torch leaves parameters untyped.

from pathlib import Path

import numpy as np
import pytest
import torch

from rolloutbus.bus.weights.manifest import Bytes
from rolloutbus.engine_worker.engines.sglang.inside.staging import MappedFiles, Staging
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    CheckpointTensor,
    Placed,
    Stage,
)
from rolloutbus.engine_worker.weights.buffers import Whereabouts, shared_buffer

CPU = torch.device("cpu")
NORM = CheckpointTensor("norm", "F32", (3,))
DENSE = CheckpointTensor("dense", "BF16", (2, 2))


def order(version: int, buffer: Bytes) -> Stage:
    place = Whereabouts().of(buffer)
    assert place is not None
    return Stage(version, [place.path], [Placed(NORM, 0, 0), Placed(DENSE, 0, 64)])


def filled(norm: list[float], dense: list[float]) -> Bytes:
    buffer = shared_buffer(128)
    buffer[:12] = np.array(norm, np.float32).view(np.uint8)
    buffer[64:72] = torch.tensor(dense).bfloat16().view(torch.uint8).numpy()
    return buffer


def test_tensors_are_there_until_they_are_dropped() -> None:
    staging = Staging(CPU, lambda: False)
    buffer = filled([1, 2, 3], [4, 5, 6, 7])
    staging.stage(order(1, buffer))
    staged = dict(staging.tensors(1) or ())
    assert staged["norm"].tolist() == [1, 2, 3]
    assert staged["dense"].tolist() == [[4, 5], [6, 7]]
    staging.drop(1)
    assert staging.tensors(1) is None


def test_a_buffer_that_is_used_again_shows_its_new_content() -> None:
    staging = Staging(CPU, lambda: False)
    buffer = filled([1, 2, 3], [4, 5, 6, 7])
    staging.stage(order(1, buffer))
    staging.drop(1)
    buffer[:12] = np.array([7, 8, 9], np.float32).view(np.uint8)
    staging.stage(order(2, buffer))
    assert dict(staging.tensors(2) or ())["norm"].tolist() == [7, 8, 9]


def test_a_file_that_is_too_small_is_refused() -> None:
    buffer = shared_buffer(70)
    with pytest.raises(ValueError, match="dense"):
        Staging(CPU, lambda: False).stage(order(1, buffer))


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        Staging(CPU, lambda: False).stage(Stage(1, [str(tmp_path / "gone")], [Placed(NORM, 0, 0)]))


def test_what_is_written_for_answers_reaches_the_host() -> None:
    buffer = shared_buffer(64)
    place = Whereabouts().of(buffer)
    assert place is not None
    MappedFiles().of(place.path, for_writing=True)[:3] = [1, 2, 3]
    assert buffer[:4].tolist() == [1, 2, 3, 0]


def test_what_is_written_over_weights_stays_in_the_process() -> None:
    buffer = shared_buffer(64)
    place = Whereabouts().of(buffer)
    assert place is not None
    MappedFiles().of(place.path)[:3] = [1, 2, 3]
    assert buffer[:4].tolist() == [0, 0, 0, 0]
