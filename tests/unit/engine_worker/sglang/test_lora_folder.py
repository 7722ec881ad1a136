"""An adapter as files for SGLang: nothing lost, fused modules whole, any scale."""

from pathlib import Path

import pytest
import torch

from rolloutbus.engine_worker.engines.sglang.lora import write_adapter
from rolloutbus.engine_worker.engines.shared.lora_adapter import Adapter, read_adapter
from tests.lora_adapters import Lora, random_lora
from tests.tiny_models import make_model

MODEL = make_model("llama", 0)
SHAPES = {
    name: (module.out_features, module.in_features)
    for name, module in MODEL.named_modules()
    if isinstance(module, torch.nn.Linear)
}


def written(lora: Lora, folder: Path) -> Adapter:
    adapter = read_adapter(lora.in_memory(), SHAPES)
    write_adapter(adapter, SHAPES, folder)
    return read_adapter(folder, SHAPES)


def test_what_is_written_is_what_was_read(tmp_path: Path) -> None:
    lora = random_lora(MODEL, 1)
    found = written(lora, tmp_path)

    assert (found.rank, found.scale) == (lora.rank, lora.alpha / lora.rank)
    for name, (a, b) in found.modules.items():
        assert torch.equal(a, lora.tensors[f"base_model.model.{name}.lora_A.weight"])
        assert torch.equal(b, lora.tensors[f"base_model.model.{name}.lora_B.weight"])
    assert len(found.modules) == len(lora.tensors) / 2


@pytest.mark.parametrize(
    ("target", "fused"),
    [
        ("k_proj", {"q_proj", "k_proj", "v_proj"}),
        ("up_proj", {"gate_proj", "up_proj"}),
        ("o_proj", {"o_proj"}),
    ],
)
def test_modules_that_run_as_one_are_written_together(
    tmp_path: Path, target: str, fused: set[str]
) -> None:
    found = written(random_lora(MODEL, 2, targets=[target]), tmp_path)

    assert {name.rpartition(".")[2] for name in found.modules} == fused
    for name, (a, b) in found.modules.items():
        assert bool((b @ a).any()) == name.endswith(target)
        assert (b.shape[0], a.shape[1]) == SHAPES[name]


def test_a_scale_by_the_root_of_the_rank_survives(tmp_path: Path) -> None:
    lora = random_lora(MODEL, 3, rank=4)
    source = lora.in_memory()
    rooted = type(source)({**source.config, "use_rslora": True}, source.specs, source.tensors)
    write_adapter(read_adapter(rooted, SHAPES), SHAPES, tmp_path)

    assert read_adapter(tmp_path, SHAPES).scale == lora.alpha / 2
