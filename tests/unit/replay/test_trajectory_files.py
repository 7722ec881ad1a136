"""What is exported comes back, whatever the form; others' tools read it, too."""

import stat
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.parquet
import pytest

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.replay.trajectories import Trajectory
from rolloutbus.replay.trajectory_files import ROWS_AT_ONCE, read, write

FORMS = pytest.mark.parametrize("form", ["jsonl", "parquet"])


def row(n: int) -> Trajectory:
    tokens = np.arange(n, dtype="<i4")
    logprobs = -np.sqrt(tokens.astype("<f4") + np.float32(0.1))
    return Trajectory(
        rid=f"c/{n}",
        client="c",
        session="s" if n % 2 else "",
        group="",
        policy="default",
        lora="",
        prompt_ids=tokens[:3],
        output_ids=tokens,
        logprobs=logprobs,
        behaviour_logprobs=logprobs * np.float32(2),
        run_versions=[0, 2**64 - 1][: n % 3],
        run_lengths=[n, 0][: n % 3],
        finish_reason="stop",
        worker="w0",
        n_attempts=1,
        n_resumed=0,
        max_new_tokens=8,
        temperature=0.7,
        top_p=0.9,
        top_k=0,
        seed=None if n % 2 else -5,
        asked_at=1_700_000_000.123456,
        ended_at=1_700_000_001.5,
        queue_ms=0.25,
        run_ms=17.0,
        output_text="héllo" if n % 2 else None,
    )


def plain(trajectory: Trajectory) -> dict[str, object]:
    arrays = {
        "prompt_ids": trajectory.prompt_ids,
        "output_ids": trajectory.output_ids,
        "logprobs": trajectory.logprobs,
        "behaviour_logprobs": trajectory.behaviour_logprobs,
    }
    lists = {name: (str(each.dtype), each.tolist()) for name, each in arrays.items()}
    return {**asdict(trajectory), **lists}


@FORMS
def test_rows_come_back_as_they_were(tmp_path: Path, form: str) -> None:
    rows = [row(n) for n in range(ROWS_AT_ONCE + 3)]
    path = tmp_path / f"rows.{form}"
    assert write(path, rows) == len(rows)
    assert list(map(plain, read(path))) == list(map(plain, rows))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@FORMS
def test_no_rows_are_a_file_without_rows(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"rows.{form}"
    assert write(path, []) == 0
    assert list(read(path)) == []


@FORMS
def test_a_file_is_whole_or_as_it_was(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"rows.{form}"
    write(path, [row(1)])
    before = path.read_bytes()

    def breaks() -> Iterator[Trajectory]:
        yield row(2)
        raise OSError("the journal's disk is gone")

    with pytest.raises(OSError, match="is gone"):
        write(path, breaks())
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"must end with \.jsonl or \.parquet"):
        write(tmp_path / "rows.csv", [])


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("field", ["logprobs", "behaviour_logprobs", "temperature", "run_ms"])
def test_numbers_that_json_does_not_know_are_refused_by_name_and_come_back_from_parquet(
    tmp_path: Path, field: str, bad: float
) -> None:
    is_column = field.endswith("logprobs")
    value = np.array([-1.0, bad, -2.0, -3.0], "<f4") if is_column else bad
    rows = [row(3), replace(row(4), **{field: value})]
    with pytest.raises(SettingsError, match=rf"^c/4: {field} .*write \.parquet") as caught:
        write(tmp_path / "rows.jsonl", rows)
    assert "JSON" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "rows.parquet", rows)
    np.testing.assert_array_equal(getattr([*read(tmp_path / "rows.parquet")][1], field), value)


def test_parquet_has_lists_of_numbers_in_columns_that_other_tools_know(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write(path, [replace(row(4), rid="c/x")])
    table = cast("Any", pyarrow.parquet.read_table(path))  # pyright: ignore[reportUnknownMemberType] - the package is untyped
    types = {str(field.name): str(field.type) for field in table.schema}
    assert types["output_ids"] == "list<element: int32>"
    assert types["logprobs"] == "list<element: float>"
    assert types["run_versions"] == "list<element: uint64>"
    assert table.column("rid").to_pylist() == ["c/x"]
