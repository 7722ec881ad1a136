"""Which GPUs the engines of one machine take."""

from pathlib import Path
from typing import Any

import msgspec

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


def test_engines_on_a_cpu_take_none(llama: Path, tmp_path: Path) -> None:
    assert first_gpus(llama, tmp_path / "cpu", {"device": "cpu"}) == [None, None, None]
