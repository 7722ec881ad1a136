"""The bytes of one tensor, wherever they lie."""

from typing import TYPE_CHECKING, TypeAlias, Union

import numpy as np

if TYPE_CHECKING:
    import torch

RawTensor: TypeAlias = Union[np.ndarray[tuple[int], np.dtype[np.uint8]], "torch.Tensor"]
"""Raw little-endian bytes: uint8 [size_bytes], in memory or on a device."""
