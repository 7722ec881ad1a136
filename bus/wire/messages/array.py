"""An array of numbers as raw bytes, with what is needed to read them.

Spec: docs/protocol.md, "Arrays".
"""

from typing import Annotated, Literal

import msgspec

from rolloutbus.bus.wire.limits import MAX_ARRAYS, Piece, Shape, Short

ArrayDtype = Literal["int32", "int64", "float32", "float16", "bfloat16", "uint8"]


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Elements of one type; `bus.wire.arrays` makes and reads them."""

    dtype: ArrayDtype
    shape: Shape
    data: Piece
    """Little endian, row-major."""


Arrays = Annotated[dict[Short, Array], msgspec.Meta(max_length=MAX_ARRAYS)]
"""Arrays of one result by name; see "Arrays"."""
