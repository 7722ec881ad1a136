"""Fresh router cores repeat the turns of a journal; a turn that differs is put into words.

Pure. Which core that is, the caller says. Spec: docs/journal.md, "Turns".
"""

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import msgspec

from rolloutbus.bus.streams.tap import Outcome, Stimulus, ToldEffect
from rolloutbus.bus.wire.codec import unpack_as
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.membership import Hello
from rolloutbus.replay.journal.records import Head, Record, Router, TurnRecord

Repeat = Callable[[Stimulus], Outcome]
"""Repeats a recorded input on a core."""
Begin = Callable[[Router], Repeat]
"""Makes a fresh core."""


class Divergence(NamedTuple):
    """A turn with another outcome than the recorded one."""

    router: int
    """Which one in the journal, from 1."""
    turn: TurnRecord
    got: Outcome
    since_s: float
    """Since the first turn of its router, by that one's clock."""
    wall_ns: int
    """Unix time when it was recorded, nanoseconds."""


class CorePlayer:
    """Takes the records of one journal, in order."""

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._repeat: Repeat | None = None
        self._next = 0
        self._began_at = 0.0
        self._wall_minus_boot_ns = 0
        self.n_routers = 0
        self.n_turns = 0
        """Number of turns that were repeated."""
        self.n_different = 0
        """Repeated turns with another outcome; the first of them may have caused the others."""
        self.n_unplayable = 0
        """Turns after a hole in the journal, or after the end of the core that should repeat it."""
        self.first: Divergence | None = None
        self.crashes: list[str] = []
        """Recorded crashes that ended routers, in order."""
        self.names: dict[bytes, str] = {}
        """Connection -> the name that its peer announced."""

    @property
    def is_same(self) -> bool:
        """Whether every turn was repeated and led to the same."""
        return self.n_turns > 0 and not self.n_different and not self.n_unplayable

    def play(self, record: Record) -> None:
        """One more record; other kinds than turns are passed over.

        Raises:
            JournalError: a core like the recorded one cannot be made here.
        """
        if isinstance(record, Head):
            self._wall_minus_boot_ns = record.wall_ns - record.at_ns
        elif isinstance(record, Router):
            self.n_routers += 1
            self._next = 0
            self._repeat = self._begin(record)
        elif isinstance(record, TurnRecord):
            self._turn(record)

    def _turn(self, turn: TurnRecord) -> None:
        self._note_names(turn.stimulus)
        if turn.outcome.crash:
            self.crashes.append(turn.outcome.crash)
        if self._repeat is None or turn.n != self._next:
            self._repeat = None  # what a core does next depends on all that it was told before
            self.n_unplayable += 1
            return
        if not self._next:
            self._began_at = turn.stimulus.at
        self._next += 1
        self.n_turns += 1
        got = self._repeat(turn.stimulus)
        if got.crash:
            self._repeat = None
        if got == turn.outcome:
            return
        self.n_different += 1
        if self.first is None:
            since_s = turn.stimulus.at - self._began_at
            wall_ns = turn.at_ns + self._wall_minus_boot_ns
            self.first = Divergence(self.n_routers, turn, got, since_s, wall_ns)

    def _note_names(self, stimulus: Stimulus) -> None:
        for entry in stimulus.entries:
            if entry.kind == "hello":
                try:
                    self.names[stimulus.peers[0]] = unpack_as(Hello, entry).name
                except (RemoteProtocolError, IndexError):
                    continue


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
