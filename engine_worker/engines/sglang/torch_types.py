"""PyTorch's types by their names in the safetensors format."""

from collections.abc import Mapping

import torch

TORCH_TYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}


def name_of_type(dtype: torch.dtype) -> str:
    """The name in the safetensors format; empty: it has none."""
    return next((name for name, each in TORCH_TYPES.items() if each == dtype), "")
