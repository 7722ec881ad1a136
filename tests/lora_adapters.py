"""Random low-rank adapters of a model, and the model that each of them should amount to."""

# pyright: reportUnknownMemberType=false
# torch's and transformers' stubs leave parameters untyped.

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import torch

from rolloutbus import Rollout
from rolloutbus.engine_worker.engine import LoraTensors, TensorSpec
from tests.tiny_models import TOLERANCE, fresh

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Lora:
    """One, in PEFT's terms."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    tensors: Mapping[str, torch.Tensor]

    @property
    def config(self) -> dict[str, object]:
        """Its `adapter_config.json`."""
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.targets),
            "bias": "none",
        }

    def save(self, folder: Path) -> Path:
        """Write it in PEFT's layout."""
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps(self.config))
        save = cast("Any", safetensors.torch).save_file
        save(dict(self.tensors), folder / "adapter_model.safetensors")
        return folder

    def in_memory(self) -> LoraTensors:
        """As it comes from the weight store."""
        raw = {name: each.view(-1).view(torch.uint8) for name, each in self.tensors.items()}
        specs = [
            TensorSpec(name, "F32", tuple(each.shape), each.nbytes)
            for name, each in self.tensors.items()
        ]
        return LoraTensors(self.config, specs, {name: each.numpy() for name, each in raw.items()})

    def merged(self, model: Any) -> Any:  # noqa: ANN401 - transformers is untyped
        """A copy of the model with the adapter in its weights."""
        found = copy.deepcopy(model)
        weights = dict(found.named_parameters())
        with torch.no_grad():
            for name, a in self.tensors.items():
                if name.endswith("lora_A.weight"):
                    module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                    b = self.tensors[name.replace("lora_A", "lora_B")]
                    weights[f"{module}.weight"].add_(b @ a * (self.alpha / self.rank))
        return found


def random_lora(
    model: Any,  # noqa: ANN401
    seed: int,
    *,
    rank: int = 4,
    targets: Sequence[str] = TARGETS,
    scale: float = 0.3,
) -> Lora:
    """An adapter that changes what the model says a lot."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets:
            prefix = f"base_model.model.{name}"
            for part, shape in (
                ("lora_A", (rank, module.in_features)),
                ("lora_B", (module.out_features, rank)),
            ):
                values = scale * torch.randn(shape, generator=generator)
                tensors[f"{prefix}.{part}.weight"] = values
    return Lora(rank, 2.0 * rank, tuple(targets), tensors)


def assert_from(model: Any, prompt: Sequence[int], rollout: Rollout) -> None:  # noqa: ANN401
    """Its logprobs are those of a plain forward pass of this model."""
    tokens = np.array([*prompt, *rollout.tokens], np.int32)
    truth = np.array(fresh(model, tokens, len(prompt)))
    assert np.abs(truth - rollout.logprobs).max() < TOLERANCE
