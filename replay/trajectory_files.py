"""Trajectories in files that others read: JSON lines and Parquet.

A file appears when it is whole, and is for its owner only.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyarrow has no types.

import os
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import msgspec
import numpy as np

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.replay.trajectories import Floats, Trajectory

ROWS_AT_ONCE = 500
"""A group of rows is in memory while it is written or read."""
_TEXTS = {"rid", "client", "session", "group", "policy", "lora", "finish_reason", "worker"}
_OPTIONAL_TEXTS = {"prompt_text", "output_text"}
_COUNTS = {"n_attempts", "n_resumed", "max_new_tokens", "top_k", "seed"}


def write_rows(file: BinaryIO, rows: Iterable[Trajectory]) -> int:
    """Write a Parquet file; returns the number of rows.

    Raises:
        SettingsError: pyarrow is missing.
    """
    arrow, parquet = _pyarrow()
    schema = arrow.schema([(each.name, _type_of(arrow, each.name)) for each in fields(Trajectory)])
    n_rows = 0
    waiting = iter(rows)
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        while some := list(islice(waiting, ROWS_AT_ONCE)):
            columns = {name: [getattr(row, name) for row in some] for name in schema.names}
            writer.write_table(arrow.table(columns, schema=schema))
            n_rows += len(some)
    return n_rows


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file, as Python's own values.

    Raises:
        SettingsError: pyarrow is missing.
    """
    _, parquet = _pyarrow()
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(ROWS_AT_ONCE):
            yield from batch.to_pylist()


def _type_of(arrow: ModuleType, name: str) -> Any:  # noqa: ANN401 - a type of pyarrow
    if name in _TEXTS | _OPTIONAL_TEXTS:
        return arrow.string()
    if name in _COUNTS:
        return arrow.int64()
    if name in ("prompt_ids", "output_ids"):
        return arrow.list_(arrow.int32())
    if name in ("logprobs", "behaviour_logprobs"):
        return arrow.list_(arrow.float32())
    if name in ("run_versions", "run_lengths"):
        return arrow.list_(arrow.uint64())
    return arrow.float64()


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        # An optional dependency.
        import pyarrow as pa  # noqa: PLC0415
        from pyarrow import parquet  # noqa: PLC0415
    except ModuleNotFoundError:
        raise SettingsError(
            "Parquet needs the package pyarrow: pip install rolloutbus[replay]"
        ) from None
    return pa, parquet


_ARRAYS = {"prompt_ids": "<i4", "output_ids": "<i4", "logprobs": "<f4", "behaviour_logprobs": "<f4"}
_FLOATS = [each.name for each in fields(Trajectory) if each.type in (float, Floats)]
JSONL, PARQUET = ".jsonl", ".parquet"


def write(path: Path, rows: Iterable[Trajectory]) -> int:
    """Write rows in the form that the name's ending asks for; returns how many.

    Raises:
        SettingsError: it ends neither with .jsonl nor with .parquet, or cannot be written, or a
            package is missing, or it ends with .jsonl and a row has infinity or NaN.
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
        for name in _FLOATS:
            if not np.isfinite(getattr(row, name)).all():
                raise SettingsError(
                    f"{row.rid}: {name} has infinity or NaN, which JSON does not know; "
                    f"write {PARQUET} instead"
                )
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
