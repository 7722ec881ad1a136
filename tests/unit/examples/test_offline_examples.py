"""Examples that read a recording say what is wrong with it, before they import torch."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.unit.replay.segments import Desk


@pytest.mark.parametrize(
    ("module", "arguments", "says"),
    [
        ("offline", ["nope.parquet"], "error: nope.parquet: there is no such file"),
        ("offline", ["untapped"], "error: untapped holds no messages of a router's tap"),
        ("offline", ["empty.jsonl"], "error: empty.jsonl has less than one step: 8 groups of 8"),
        ("retrain", ["nope.parquet", "run"], "error: nope.parquet: there is no such file"),
        ("retrain", ["empty.jsonl", "run"], "run/config.json"),
    ],
)
def test_what_cannot_be_trained_on_is_said_before_torch_is_imported(
    module: str,
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    desk = Desk(Path("untapped"))
    desk.add("c/1")
    desk.close()
    Path("empty.jsonl").touch()
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.setitem(sys.modules, "torch", None)  # to import it is an error
    # Another test of this process may have imported it, of which runpy warns.
    monkeypatch.delitem(sys.modules, f"rolloutbus.examples.{module}", raising=False)
    with pytest.raises(SystemExit, match=says):
        runpy.run_module(f"rolloutbus.examples.{module}", run_name="__main__")
