"""Trajectories in files that others read: JSON lines and Parquet.

A file appears when it is whole, and is for its owner only.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.replay.rollouts.parquet import read_rows, write_rows
from rolloutbus.replay.rollouts.trajectories import Trajectory

_ARRAYS = {"prompt_ids": "<i4", "output_ids": "<i4", "logprobs": "<f4", "behaviour_logprobs": "<f4"}
JSONL, PARQUET = ".jsonl", ".parquet"


def write(path: Path, rows: Iterable[Trajectory]) -> int:
    """Write rows in the form that the name's ending asks for; returns how many.

    Raises:
        SettingsError: it ends neither with .jsonl nor with .parquet, or cannot be written, or a
            package is missing.
        OSError: the disk is full.
    """
    _check(path)
    temporary = path.with_name(f".{path.name}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, 0o600)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            n_rows = (_write_lines if path.suffix == JSONL else write_rows)(file, rows)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return n_rows


def read(path: Path) -> Iterator[Trajectory]:
    """The rows of a file that `write` has written.

    Raises:
        SettingsError: it has another ending, or a package is missing.
        msgspec.DecodeError: it holds something else.
    """
    _check(path)
    if path.suffix == PARQUET:
        yield from map(_trajectory, read_rows(path))
        return
    with path.open("rb") as file:
        for line in file:
            yield _trajectory(msgspec.json.decode(line))


def _check(path: Path) -> None:
    if path.suffix not in (JSONL, PARQUET):
        raise SettingsError(f"{path.name}: the name must end with {JSONL} or {PARQUET}")


def _write_lines(file: BinaryIO, rows: Iterable[Trajectory]) -> int:
    n_rows = 0
    for row in rows:
        line = msgspec.json.encode(row, enc_hook=_numbers)
        file.write(line + b"\n")
        n_rows += 1
    return n_rows


def _numbers(array: Any) -> list[Any]:  # noqa: ANN401 - what msgspec does not know
    return array.tolist()


def _trajectory(row: dict[str, Any]) -> Trajectory:
    arrays = {name: np.array(row[name], dtype) for name, dtype in _ARRAYS.items()}
    values: dict[str, Any] = {**row, **arrays}
    return Trajectory(**values)
