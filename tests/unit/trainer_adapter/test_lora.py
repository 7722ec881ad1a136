"""A trainer's adapter in PEFT's terms, whatever names its tensors have."""

from typing import Any, cast

import pytest
import torch

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.publisher.lora import config_of, factors_of

A, B = torch.ones(4, 8), torch.ones(16, 4)
MODULE = "model.layers.0.mlp.up_proj"
PEFT = f"base_model.model.{MODULE}"


@pytest.mark.parametrize(
    "names",
    [
        (f"{PEFT}.lora_A.weight", f"{PEFT}.lora_B.weight"),
        (f"{PEFT}.lora_A.default.weight", f"{PEFT}.lora_B.default.weight"),
        (f"{MODULE}.lora_A.weight", f"{MODULE}.lora_B.weight"),
    ],
    ids=["files", "a model of PEFT's", "bare"],
)
def test_factors_get_the_names_of_files_and_the_model_is_left_out(names: tuple[str, str]) -> None:
    model = {f"{PEFT}.base_layer.weight": torch.ones(16, 8)}
    found = factors_of({names[0]: A, names[1]: B} | model)

    assert set(found) == {f"{PEFT}.lora_A.weight", f"{PEFT}.lora_B.weight"}


def test_the_description_follows_from_the_factors() -> None:
    factors = factors_of({f"{PEFT}.lora_A.weight": A, f"{PEFT}.lora_B.weight": B})

    assert config_of(factors, 8.0, use_rslora=False) == {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8.0,
        "use_rslora": False,
        "target_modules": ["up_proj"],
        "bias": "none",
    }


@pytest.mark.parametrize(
    "tensors",
    [
        {f"{MODULE}.weight": torch.ones(16, 8)},
        {f"{PEFT}.lora_A.weight": A},
        {f"{PEFT}.lora_B.weight": B},
        {f"{PEFT}.lora_A.weight": torch.tensor(1.0), f"{PEFT}.lora_B.weight": B},
    ],
    ids=["no factors", "no B", "no A", "no matrix"],
)
def test_what_has_no_pairs_is_no_adapter(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(SettingsError, match="this is no adapter"):
        factors_of(tensors)


def test_what_has_no_tensors_is_no_adapter() -> None:
    with pytest.raises(SettingsError, match="a module, a state dict or"):
        factors_of(cast("Any", 5))


def test_an_adapter_has_one_rank() -> None:
    factors = factors_of({f"{PEFT}.lora_A.weight": A, f"{PEFT}.lora_B.weight": torch.ones(16, 5)})
    with pytest.raises(SettingsError, match="one rank"):
        config_of(factors, 8.0, use_rslora=False)
