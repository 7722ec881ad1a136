"""Trajectories as Parquet: a row each, lists of numbers in its columns.

The only user of pyarrow, which is installed by the extra `replay` alone.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyarrow has no types.

from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.replay.rollouts.trajectories import Trajectory

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
