"""The second MessagePack library, which knows nothing of our types."""

from typing import Any

import msgpack


def read(raw: bytes) -> Any:  # noqa: ANN401 - whatever MessagePack can hold
    """The one object in `raw`; trailing bytes raise."""
    return msgpack.unpackb(raw)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - the package is untyped


def write(value: Any) -> bytes:  # noqa: ANN401 - whatever MessagePack can hold
    """`value` in MessagePack."""
    raw = msgpack.packb(value)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - the package is untyped
    assert isinstance(raw, bytes)
    return raw
