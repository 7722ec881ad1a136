"""The second MessagePack library, which knows nothing of our types."""

from typing import Any

import msgpack


def read(raw: bytes) -> Any:  # noqa: ANN401 - whatever MessagePack can hold
    """The one object in `raw`; trailing bytes raise."""
    return msgpack.unpackb(raw, strict_map_key=False)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - the package is untyped


def write(value: Any) -> bytes:  # noqa: ANN401 - whatever MessagePack can hold
    """`value` in MessagePack."""
    raw = msgpack.packb(value)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - the package is untyped
    assert isinstance(raw, bytes)
    return raw


def read_all(raw: bytes) -> list[Any]:
    """The objects that stand in `raw` one after another."""
    unpacker = msgpack.Unpacker()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] - the package is untyped
    unpacker.feed(raw)  # pyright: ignore[reportUnknownMemberType] - the package is untyped
    return list(unpacker)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType] - the package is untyped
