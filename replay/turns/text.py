"""A turn of a router in words: whom it concerns, and every field of what was said.

Pure.
"""

import datetime as dt
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import msgspec

from rolloutbus.bus.streams.tap import Outcome, Stimulus, ToldEffect
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Entry
from rolloutbus.replay.turns.core_player import Divergence

MAX_HEX_BYTES = 32
"""Longer ones are told by their length and their beginning."""

Names = Mapping[bytes, str]
"""Who is at a connection, as far as it is known."""


class DivergenceText(NamedTuple):
    """A divergence for people, and for their tools as JSON."""

    router: int
    turn: int
    record: int
    since_s: float
    """Since that router began."""
    time: str
    """When it was recorded, UTC."""
    event: str
    told: list[str]
    """What the core was told."""
    expected: list[str]
    """What came of it then, from the first difference on."""
    got: list[str]
    """What came of it now, from there on."""


def text_of(divergence: Divergence, names: Names) -> DivergenceText:
    """All of it in words."""
    turn = divergence.turn
    expected = _outcome(turn.outcome, names)
    got = _outcome(divergence.got, names)
    n_equal = 0
    for one, other in zip_longest(expected, got):
        if one != other:
            break
        n_equal += 1
    wall = dt.datetime.fromtimestamp(divergence.wall_ns / 1e9, dt.UTC)
    return DivergenceText(
        divergence.router,
        turn.n,
        turn.seq,
        round(divergence.since_s, 6),
        wall.isoformat(timespec="milliseconds"),
        turn.stimulus.event,
        _stimulus(turn.stimulus, names),
        expected[n_equal:] or ["nothing more"],
        got[n_equal:] or ["nothing more"],
    )


def _stimulus(stimulus: Stimulus, names: Names) -> list[str]:
    whose = [f"connection of {_name(peer, names)}" for peer in stimulus.peers]
    word = f"{stimulus.text} {stimulus.count or ''}".strip()
    return [*whose, *filter(None, [word]), *map(entry_text, stimulus.entries)]


def _outcome(outcome: Outcome, names: Names) -> list[str]:
    crash = [f"it crashed: {outcome.crash}"] if outcome.crash else []
    return [*(line for effect in outcome.effects for line in _effect(effect, names)), *crash]


def _effect(effect: ToldEffect, names: Names) -> list[str]:
    peer, entries = effect
    if entries is None:
        return [f"forget {_name(peer, names)}"]
    return [f"to {_name(peer, names)}: {entry_text(entry)}" for entry in entries]


def _name(peer: bytes, names: Names) -> str:
    return names.get(peer) or f"peer {peer.hex()[-8:]}"


def entry_text(entry: Entry) -> str:
    """`finished c/1 attempt 1.7 route w0 {"finish_reason":"length",…}`."""
    fields = {
        "attempt": "" if entry.attempt == NO_ATTEMPT else f"{entry.attempt[0]}.{entry.attempt[1]}",
        "epoch": entry.epoch,
        "route": entry.route,
        "deadline_ms": str(entry.deadline_ms or ""),
        "place": _json(msgspec.to_builtins(entry.place)) if entry.place else "",
    }
    said = [f"{name} {value}" for name, value in fields.items() if value]
    return " ".join(filter(None, [entry.kind, entry.rid, *said, _body(entry.body)]))


def _body(body: msgspec.Raw) -> str:
    try:
        return _json(msgspec.msgpack.decode(body))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return f"<{len(body)} bytes that are no body>"


def _json(value: Any) -> str:  # noqa: ANN401 - whatever a peer has said
    return msgspec.json.encode(_readable(value)).decode()


def _readable(value: Any) -> Any:  # noqa: ANN401 - whatever a peer has said
    if isinstance(value, bytes):
        head = value[:MAX_HEX_BYTES].hex()
        return head if len(value) <= MAX_HEX_BYTES else f"{len(value)} bytes: {head}…"
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        return {str(key): _readable(each) for key, each in items.items()}
    if isinstance(value, list | tuple):
        return [_readable(each) for each in cast("Sequence[Any]", value)]
    return value
