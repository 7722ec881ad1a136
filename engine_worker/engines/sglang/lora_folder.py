"""An adapter as files that SGLang reads without leaving anything out."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from rolloutbus.bus.weights.manifest import lay_out
from rolloutbus.bus.weights.tensor_files import header_of
from rolloutbus.engine_worker.engines.shared.lora_adapter import (
    PREFIX,
    A,
    Adapter,
    B,
    Factors,
    Shape,
)
from rolloutbus.engine_worker.weights.adapter_sources import CONFIG, TENSORS
from rolloutbus.engine_worker.weights.torch_types import DTYPE_NAMES

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that SGLang runs as one, and looks for together."""


def write_adapter(adapter: Adapter, shapes: Mapping[str, Shape], folder: Path) -> None:
    """Write an adapter in PEFT's layout.

    Args:
        adapter: of the model.
        shapes: (out, in) of each of its linear modules, by name.
        folder: an empty directory.
    """
    modules = completed(adapter, shapes)
    config = {
        "peft_type": "LORA",
        "r": adapter.rank,
        # SGLang knows one way to make a scale of it.
        "lora_alpha": adapter.scale * adapter.rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "bias": "none",
    }
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    tensors = {
        f"{PREFIX}{module}{suffix}": tensor
        for module, factors in modules.items()
        for suffix, tensor in zip((A, B), factors, strict=True)
    }
    layout = lay_out(
        (name, DTYPE_NAMES[each.dtype], tuple(each.shape)) for name, each in tensors.items()
    )
    with (folder / TENSORS).open("wb") as file:
        file.write(header_of(layout))
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def completed(adapter: Adapter, shapes: Mapping[str, Shape]) -> Mapping[str, Factors]:
    """The adapted modules, and with factors of zero those that are fused with them.

    SGLang fails on an adapter of some of them, or forgets it.
    """
    found = dict(adapter.modules)
    for module, factors in adapter.modules.items():
        parent, _, leaf = module.rpartition(".")
        for group in FUSED:
            for other in group if leaf in group else ():
                name = f"{parent}.{other}"
                if name in shapes and name not in found:
                    n_out, n_in = shapes[name]
                    dtype = factors.a.dtype
                    a = torch.zeros(adapter.rank, n_in, dtype=dtype)
                    found[name] = Factors(a, torch.zeros(n_out, adapter.rank, dtype=dtype))
    return found
