"""Has router cores of this program repeat the turns of a journal, and says where they differ."""

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.cli.journal_gaps import fail_reading, gaps_told, refuse_gaps, tell_gaps
from rolloutbus.cli.terminal import ExitStatus, checked, fail
from rolloutbus.launcher.version import installed_version
from rolloutbus.replay.journal.format import JournalError
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.journal.records import Router
from rolloutbus.replay.turns.core_player import CorePlayer, Repeat
from rolloutbus.replay.turns.text import DivergenceText, text_of
from rolloutbus.router.recording import core_of, repeat
from rolloutbus.router.settings import RouterSettings

Core = Annotated[
    bool,
    typer.Option(
        "--core",
        help="Instead: have a fresh router repeat what `up --journal` wrote, and compare.",
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=JSON",
        help="--core: another value of a router's setting, e.g. queue_limit=5; may be repeated.",
    ),
]
MAX_LINES, MAX_CHARS = 5, 240
"""Of each part of a divergence on a terminal; JSON has all of it."""


def replay_core(
    directory: Path, changes: Iterable[str], *, allow_gaps: bool, as_json: bool
) -> None:
    """Repeat a router's journal, print what was found, and end with 1 if anything differs.

    Args:
        directory: what `up --journal` or `router --journal` has written.
        changes: `NAME=JSON` of settings that the repeating cores have instead.
        allow_gaps: take a journal that is not whole as it is, and go on behind damage.
        as_json: one JSON object instead of a text.
    """
    begun = _Begun(checked(partial(settings_in, changes)))
    player = CorePlayer(begun)
    try:
        journal = Journal(directory, skip=allow_gaps)
        for record in journal:
            player.play(record)
    except (JournalError, OSError, SettingsError, msgspec.DecodeError) as error:
        fail_reading(error)
    tell_gaps(journal)
    if not player.n_routers:
        fail(f"{directory} has no turns of a router: record with --journal", ExitStatus.FAILED)
    first = text_of(player.first, player.names) if player.first is not None else None
    told = {
        "is_same": player.is_same,
        "routers": player.n_routers,
        "turns": player.n_turns,
        "different": player.n_different,
        "unplayable": player.n_unplayable,
        "crashes": player.crashes,
        "programs": sorted(begun.programs),
        "first": first._asdict() if first is not None else None,
        **gaps_told(journal),
    }
    text = msgspec.json.encode(told).decode() if as_json else _report(told, first)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    if not player.is_same:
        fail("the cores did not do the same", ExitStatus.FAILED)
    refuse_gaps(journal, are_allowed=allow_gaps)


def settings_in(changes: Iterable[str]) -> dict[str, Any]:
    """`["queue_limit=5"]` -> `{"queue_limit": 5}`.

    Raises:
        SettingsError: one is not NAME=JSON.
    """
    found: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        try:
            found[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            raise SettingsError(f"{change!r} is not NAME=JSON") from None
        if not name or not equals:
            raise SettingsError(f"{change!r} is not NAME=JSON")
    return found


class _Begun:
    """Makes the cores, and remembers which programs wrote the journal."""

    def __init__(self, changes: dict[str, Any]) -> None:
        self._changes = changes
        self.programs: set[str] = set()

    def __call__(self, router: Router) -> Repeat:
        self.programs.add(router.program)
        try:
            recorded = cast("dict[str, Any]", msgspec.json.decode(router.settings))
            settings = msgspec.convert({**recorded, **self._changes}, RouterSettings)
        except (msgspec.DecodeError, SettingsError) as error:
            raise JournalError(
                f"a router of {router.program} cannot be made here, {installed_version()}: {error}"
            ) from error
        return partial(repeat, core_of(settings, router.instance, router.tap).handle)


def _report(told: dict[str, Any], first: DivergenceText | None) -> str:
    summary = (
        f"{told['turns']:,} turns repeated, {told['different']:,} differ; "
        f"the journal tells of {told['routers']:,} router{'s'[: told['routers'] > 1]}"
    )
    if told["unplayable"]:
        summary += f"; {told['unplayable']:,} could not be repeated: turns before them are missing"
    summary += "".join(f"\na router crashed: {_clipped(crash)}" for crash in told["crashes"])
    if first is None:
        return summary
    where = (
        f"first: turn {first.turn:,} of router {first.router} ({first.event}), record "
        f"{first.record:,}, {first.since_s:.3f} s after its start, {first.time}"
    )
    lines = [summary, where]
    for title, part in (("told", first.told), ("expected", first.expected), ("got", first.got)):
        more = [f"… {len(part) - MAX_LINES} more"] if len(part) > MAX_LINES else []
        lines += [f"  {title + ':':9} {_clipped(line)}" for line in [*part[:MAX_LINES], *more]]
    return "\n".join(lines)


def _clipped(line: str) -> str:
    return line if len(line) <= MAX_CHARS else line[:MAX_CHARS] + "…"
