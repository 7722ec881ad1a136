"""Types of tensors, by the names that the safetensors format gives them."""

from collections.abc import Mapping
from typing import NamedTuple


class FloatBits(NamedTuple):
    """How to see that a floating-point number is none."""

    size_bytes: int
    """Of one number; a complex one is two."""
    not_finite: int
    """Bits that are all set in infinity and NaN, and in nothing else."""


class Dtype(NamedTuple):
    """One type."""

    size_bytes: int
    """Of one element."""
    numpy: str = ""
    """numpy's name; empty: it has none."""
    torch: str = ""
    """PyTorch's name; empty: tensors of this type are neither published nor taken from there."""
    floats: FloatBits | None = None
    """None: its values are always finite."""


DTYPES: Mapping[str, Dtype] = {
    "BOOL": Dtype(1, "bool", "bool"),
    "U8": Dtype(1, "uint8", "uint8"),
    "I8": Dtype(1, "int8", "int8"),
    "F8_E4M3": Dtype(1, "", "float8_e4m3fn", FloatBits(1, 0x7F)),
    "F8_E5M2": Dtype(1, "", "float8_e5m2", FloatBits(1, 0x7C)),
    "I16": Dtype(2, "int16", "int16"),
    "U16": Dtype(2, "uint16"),
    "F16": Dtype(2, "float16", "float16", FloatBits(2, 0x7C00)),
    "BF16": Dtype(2, "", "bfloat16", FloatBits(2, 0x7F80)),
    "I32": Dtype(4, "int32", "int32"),
    "U32": Dtype(4, "uint32"),
    "F32": Dtype(4, "float32", "float32", FloatBits(4, 0x7F80_0000)),
    "I64": Dtype(8, "int64", "int64"),
    "U64": Dtype(8, "uint64"),
    "F64": Dtype(8, "float64", "float64", FloatBits(8, 0x7FF0_0000_0000_0000)),
    "C64": Dtype(8, "complex64", "complex64", FloatBits(4, 0x7F80_0000)),
}
"""All that may be published."""

CASTABLE = ("F64", "F32", "F16", "BF16")
"""Types that a publisher casts to one another."""
