"""PyTorch's types by their names in the safetensors format, and back."""

from collections.abc import Mapping

import torch

from rolloutbus.bus.weights.dtypes import DTYPES

TORCH_TYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, each.torch) for name, each in DTYPES.items() if each.torch
}
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in TORCH_TYPES.items()}
