"""Which GPUs the engines of one machine take."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.launcher.plan import FleetPlan
from rolloutbus.launcher.run_dir import RunDirectory
from rolloutbus.launcher.settings import FleetSettings


def first_gpus(model: Path, run_dir: Path, engine_options: dict[str, Any]) -> list[object]:
    settings = FleetSettings(model=model, workers=3, engine="sglang", engine_options=engine_options)
    with RunDirectory(run_dir, keep_logs=False) as opened:
        plan = FleetPlan(settings, opened)
        found: list[object] = []
        for name in plan.places:
            plan.worker(name, "ipc:///tmp/backend")
            written = (opened.path / f"{name}.json").read_bytes()
            worker = msgspec.json.decode(written, type=WorkerSettings)
            found.append(worker.engine_options.get("arguments", {}).get("base_gpu_id"))
    return found


def test_each_engine_takes_the_gpus_after_those_of_the_one_before(
    llama: Path, tmp_path: Path
) -> None:
    told = {"arguments": {"tp_size": "2", "base_gpu_id": 1}}
    assert first_gpus(llama, tmp_path / "plain", {}) == [0, 1, 2]
    assert first_gpus(llama, tmp_path / "pairs", told) == [1, 3, 5]


def test_a_worker_whose_gpus_are_not_here_is_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")
    pairs = {"arguments": {"tp_size": 2}}
    settings = FleetSettings(model=llama, workers=3, engine="sglang", engine_options=pairs)
    with RunDirectory(tmp_path / "run", keep_logs=False) as opened:
        plan = FleetPlan(settings, opened)
        with pytest.raises(SettingsError, match=r"no GPUs are left for w3: .* 6 to 7, .* has 6"):
            plan.take_places(1)
        plan.give_back("w1")
        (place,) = plan.take_places(1)
        assert (place.name, place.number) == ("w1", 1)


def test_an_engine_with_gpus_of_its_own_sees_no_others(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    settings = FleetSettings(model=llama, workers=1, engine="sglang", gpus=[[2]])
    with RunDirectory(tmp_path / "run", keep_logs=False) as opened:
        spec = FleetPlan(settings, opened).worker("w0", "ipc:///tmp/backend")
        written = msgspec.json.decode((opened.path / "w0.json").read_bytes(), type=WorkerSettings)
    assert spec.environment is not None
    assert spec.environment["CUDA_VISIBLE_DEVICES"] == "2"
    assert "base_gpu_id" not in written.engine_options.get("arguments", {})


def test_engines_on_a_cpu_take_none(llama: Path, tmp_path: Path) -> None:
    assert first_gpus(llama, tmp_path / "cpu", {"device": "cpu"}) == [None, None, None]
