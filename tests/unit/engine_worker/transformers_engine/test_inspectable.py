"""What an operator learns of a transformers engine: its weights as files, its load, a profile."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers

from rolloutbus.bus.wire.messages.control import StartProfile
from rolloutbus.engine_worker.engine import EngineBusy
from tests.step_log import StepLog
from tests.tiny_models import Build, changed, make_model, work


@pytest.mark.shows("save to a directory")
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_saved_weights_are_those_that_were_installed_last(
    build: Build, paths: dict[str, Path], tmp_path: Path, name: str
) -> None:
    engine = build(name)
    model = make_model(name, 0)
    engine.weights.install(1, changed(model, seed=3), "keep")

    engine.checkpointer.save(str(tmp_path), "safetensors")

    loaders = cast("Any", transformers.AutoModelForCausalLM)
    loaded = loaders.from_pretrained(tmp_path, dtype=torch.float32)
    expected = dict(model.named_parameters())
    for key, tensor in loaded.named_parameters():
        assert torch.equal(tensor, expected[key]), key
    assert (tmp_path / "config.json").read_bytes() == (paths[name] / "config.json").read_bytes()


def test_only_whole_tensors_are_written(build: Build, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sharded"):
        build().checkpointer.save(str(tmp_path), "sharded")


@pytest.mark.shows("start_profile", "stop_profile")
def test_a_profile_holds_the_steps_that_ran_meanwhile(
    build: Build, log: StepLog, tmp_path: Path
) -> None:
    engine = build()
    engine.profiler.start(tmp_path, StartProfile())
    engine.generate([work("r0", 4)])
    log.wait_finished("r0")

    engine.profiler.stop()

    (trace,) = tmp_path.iterdir()
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::linear" in names


def test_a_second_profile_waits_for_the_first(build: Build, tmp_path: Path) -> None:
    engine = build()
    engine.profiler.start(tmp_path, StartProfile())

    with pytest.raises(EngineBusy, match="stop_profile"):
        engine.profiler.start(tmp_path, StartProfile())
    engine.profiler.stop()
    with pytest.raises(EngineBusy, match="start_profile"):
        engine.profiler.stop()


@pytest.mark.parametrize(
    "ask", [StartProfile(activities=["MEM"]), StartProfile(activities=[]), StartProfile(n_steps=3)]
)
def test_what_cannot_be_recorded_is_refused(
    build: Build, tmp_path: Path, ask: StartProfile
) -> None:
    engine = build()
    with pytest.raises(ValueError, match=r"activities|n_steps"):
        engine.profiler.start(tmp_path, ask)


@pytest.mark.shows("get_loads")
def test_load_counts_blocks_of_what_was_sampled(build: Build, log: StepLog) -> None:
    engine = build(prefix_cache=True, block_size=4)
    before = engine.meter.load()
    engine.generate([work("r0", 12)])
    log.wait_finished("r0")
    after = engine.meter.load()

    assert after["n_steps"] > before["n_steps"]
    assert after["n_kv_blocks_idle"] > 0
    assert sum(before[f"n_kv_blocks_{kind}"] for kind in ("used", "idle", "free")) == sum(
        after[f"n_kv_blocks_{kind}"] for kind in ("used", "idle", "free")
    )
