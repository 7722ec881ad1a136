"""Checks a caller's values before they are sent, as their receiver will check them.

A value of a wrong type must end its own call and nothing else: it is found here, before the request
is kept, so that sending it again cannot fail. Spec: docs/protocol.md, "Limits".
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar, cast

import msgspec
from msgspec import Raw

from rolloutbus.bus.wire.codec import COMPLAINTS, complaint, pack
from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.limits import MAX_SHORT_CHARS
from rolloutbus.bus.wire.messages.endings import bad_request

StructT = TypeVar("StructT", bound=msgspec.Struct)

_UNPACKABLE = (TypeError, ValueError, OverflowError, RecursionError, AttributeError)
"""What MessagePack raises of values that it has no form for."""
_PLACE = re.compile(r"(?P<message>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<index>[0-9]+)\]")
MAX_SECONDS = 1e12
"""In milliseconds it fits a message, whatever the time is now."""
MAX_DEPTH = 8
"""No message of ours is nested deeper."""

_decoders: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[msgspec.Struct]] = {}


def sealed(body: object, expected: type[StructT], *, field: str = "") -> tuple[StructT, Raw]:
    """A message as its receiver will read it, and its bytes.

    Numbers and arrays of numpy, and instances of subclasses of plain types, become plain.

    Args:
        body: what the caller gave.
        expected: what it is to be.
        field: what the message is called, where it is a part of another.

    Raises:
        Refused: `bad_request`; the message says what is wrong, and `.field` where.
    """
    if not isinstance(body, expected):
        message = f"expected {expected.__name__}, got a value of type {type(body).__name__}"
        raise Refused(bad_request(field or "body", message))
    try:
        raw = pack(body)
    except _UNPACKABLE as error:
        where, value = _culprit(body, field, MAX_DEPTH)
        message = f"a value of type {type(value).__name__} cannot be sent: {complaint(error)}"
        raise Refused(bad_request(where or "body", message)) from error
    decoder = _decoders.get(expected)
    if decoder is None:
        decoder = _decoders[expected] = msgspec.msgpack.Decoder(expected)
    try:
        plain = decoder.decode(raw)
    except COMPLAINTS as error:
        found = _PLACE.fullmatch(complaint(error))
        message, path = (found["message"], found["path"]) if found else (complaint(error), "")
        where = _dotted(body, field, path or "")
        raise Refused(bad_request(where or "body", message)) from error
    return plain, raw  # type: ignore[return-value] - the decoder is that of its type


def seconds_of(value: object, *, field: str = "deadline_s") -> float:
    """A finite number of seconds, at most MAX_SECONDS.

    Raises:
        Refused: it is none; `.field` is `field`.
    """
    try:
        seconds = float(value)  # type: ignore[arg-type] - tried, because anything may come
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if isinstance(value, str | bytes) or not math.isfinite(seconds):
        is_number = isinstance(value, float) or value is None
        shown = str(value) if is_number else f"a value of type {type(value).__name__}"
        raise Refused(
            bad_request(field, f"expected a finite number of seconds above 0, got {shown}")
        )
    if seconds > MAX_SECONDS:
        raise Refused(bad_request(field, f"{seconds:g} seconds are more than {MAX_SECONDS:g}"))
    return seconds


def _dotted(body: object, field: str, path: str) -> str:
    """A decoder's path in the names that callers use; a field may travel by another, or by none."""
    value, names = body, [field] if field else []
    for step in _STEP.finditer(path):
        name = step["name"]
        if isinstance(value, msgspec.Struct):
            known = value.__struct_fields__
            index = value.__struct_encode_fields__.index(name) if name else int(step["index"])
            name = known[index]
        if name is None:
            names.append(f"{names.pop() if names else ''}[{step['index']}]")
            value = None
        else:
            names.append(name)
            value = getattr(value, name, None)
    return ".".join(names)


def _culprit(value: object, path: str, depth: int) -> tuple[str, object]:
    """The innermost part that cannot be packed, and where it is."""
    if depth > 0:
        for name, part in _parts(value):
            if not _is_packable(part):
                where = f"{path}{name}" if name.startswith("[") else f"{path}.{name}"
                return _culprit(part, where.removeprefix("."), depth - 1)
    return path, value


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield name, getattr(value, name, None)
    elif isinstance(value, Mapping):
        for key, part in cast("Mapping[object, object]", value).items():
            yield "[key]", key
            yield f"[{str(key)[:MAX_SHORT_CHARS]}]", part
    elif isinstance(value, Sequence | AbstractSet) and not isinstance(
        value, str | bytes | bytearray
    ):
        for index, part in enumerate(cast("Sequence[object]", value)):
            yield f"[{index}]", part


def _is_packable(value: object) -> bool:
    try:
        pack(value)  # type: ignore[arg-type] - a part of a message
    except _UNPACKABLE:
        return False
    return True
