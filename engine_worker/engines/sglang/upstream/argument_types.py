"""From what an operator wrote for an argument of SGLang to the type that it declares."""

from typing import Any

import msgspec


def typed(name: str, value: object, kind: Any) -> object:  # noqa: ANN401 - any annotation
    """`value` as `kind`; text that is not of that type itself is read as JSON.

    Raises:
        ValueError: it cannot be; names the argument.
    """
    for read in (value, _decoded(value)):
        try:
            return msgspec.convert(read, kind)
        except msgspec.ValidationError:
            continue
        except TypeError:
            # An annotation that only SGLang itself can judge.
            return _decoded(value)
    raise ValueError(f"arguments: {name}: {value!r} is not {_shown(kind)}")


def _decoded(value: object) -> object:
    """What text says as JSON, if it says anything; other values are themselves."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value


def _shown(kind: Any) -> str:  # noqa: ANN401 - any annotation
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
