"""Hostile variants of good messages: of their bytes, and of their values in good MessagePack."""

import random
from typing import Any, cast

import msgspec

LONG_HEADS = [b"\xdf", b"\xdd", b"\xdb", b"\xc6"]
"""Of maps, lists, texts and bytes whose length takes four bytes."""
NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 127, 128, 2**31, 2**32, 2**53),
    *(2**63 - 1, 2**63, 2**64 - 1, -(2**63), -(2**31)),
    *(0.0, -0.0, 1e308, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        "x",
        "0",
        "..",
        "/etc/passwd",
        "a/1",
        "a/1@w0",
        "w0",
        "trainer",
        "\0",
        "\u202e",
        "é" * 70,
    ),
    *("x" * 65, "x" * 151, "x" * 257, "x" * 5000, "9" * 5000, "-1", "min:1", "\ud7ff\U0010ffff"),
    *(b"", b"\0", b"x" * 3, b"\xff" * 8, bytes(5000)),
    *([], [[]], [0, 0], ["a", [0, 0]], [["a", [0, 0]]] * 50, {}, {"a": 1}, {"seq": 1}, [{}] * 9),
    msgspec.msgpack.Ext(5, b"abc"),
    msgspec.msgpack.Ext(-1, b"\xff" * 12),
]
MANY = 100
"""Lists longer than this are not multiplied again: what lies inside of them would explode."""
_encode = msgspec.msgpack.Encoder().encode


def changed_bytes(frame: bytes, rng: random.Random, *, spared: int = 0) -> bytes:
    """One or two changes, mostly behind the first `spared` bytes."""
    mutant = bytearray(frame)
    for _ in range(rng.randint(1, 2)):
        first = 0 if rng.random() < 0.1 else spared
        if len(mutant) <= first:
            break
        at = rng.randrange(first, len(mutant))
        match rng.choice((0, 0, 0, 1, 1, 1, 2, 3, 4, 5)):
            case 0:
                mutant[at] = rng.randrange(256)
            case 1:
                mutant[at] ^= 1 << rng.randrange(8)
            case 2:
                mutant[at:at] = rng.randbytes(rng.randint(1, 9))
            case 3:
                del mutant[at : at + rng.randint(1, 9)]
            case 4:  # sizes that are not there
                mutant[at:at] = rng.choice(LONG_HEADS) + b"\xff" * 4
            case _:
                mutant[at:at] = rng.choice((b"\x91", b"\x81\xa0")) * rng.randint(1, 3000)
    return bytes(mutant)


def changed_value(value: Any, rng: random.Random) -> Any:  # noqa: ANN401 - whatever MessagePack holds
    """The same with one part replaced, removed, repeated or added."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        whole = dict(cast("dict[Any, Any]", value))
        key = rng.choice(list(whole))
        match rng.randrange(8):
            case 0:
                del whole[key]
            case 1:
                whole[rng.choice(("", "extra", "x" * 3000, "__class__"))] = rng.choice(NASTY)
            case _:
                whole[key] = changed_value(whole[key], rng)
        return whole
    if isinstance(value, list) and value and rng.random() < 0.9:
        parts = list(cast("list[Any]", value))
        at = rng.randrange(len(parts))
        match rng.randrange(8):
            case 0:
                del parts[at]
            case 1:
                parts.insert(at, rng.choice(NASTY))
            case 2:
                parts += parts[:1] * (300 if len(parts) < MANY else 1)
            case _:
                parts[at] = changed_value(parts[at], rng)
        return parts
    return rng.choice(NASTY)


def changed_map(body: bytes, rng: random.Random) -> bytes:
    """A MessagePack value with one to three of its parts changed."""
    value = msgspec.msgpack.decode(body)
    for _ in range(rng.randint(1, 2)):
        value = changed_value(value, rng)
    return _encode(value)
