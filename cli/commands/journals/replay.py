"""`rolloutbus replay`: a recording, played to subscribers, or asked of a fleet again."""

import asyncio
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import msgspec
import typer

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.near_names import nearest
from rolloutbus.cli.commands.journals.gaps import (
    AllowGaps,
    fail_reading,
    gaps_told,
    refuse_gaps,
    tell_gaps,
)
from rolloutbus.cli.commands.journals.regenerate import Regeneration, regenerate
from rolloutbus.cli.options import Address, AsJson, Speed, YourKey, example, speed_of
from rolloutbus.cli.terminal import ExitStatus, checked, fail, print_json, run
from rolloutbus.cli.verbs import Verbs
from rolloutbus.launcher.run_dir import RunDirectory
from rolloutbus.launcher.version import installed_version
from rolloutbus.replay.journal.format import JournalError
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.journal.records import Router
from rolloutbus.replay.player import Playback, Player, PlayerSettings
from rolloutbus.replay.regenerating import LOGPROB_TOLERANCE
from rolloutbus.replay.turn_player import CorePlayer, DivergenceText, Repeat, text_of
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
    """Repeat a router's journal, print what was found, and end with 1 if anything differs."""
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
        fail(
            f"{directory} has no turns of a router: `up --journal DIR` and `router --journal DIR` "
            "write them down",
            ExitStatus.FAILED,
        )
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
    if player.n_different:
        fail("the cores did not do the same", ExitStatus.FAILED)
    refuse_gaps(journal, are_allowed=allow_gaps)
    if not player.is_same:
        fail("nothing differs, but not every turn was repeated", ExitStatus.FAILED)


def settings_in(changes: Iterable[str]) -> dict[str, Any]:
    """`["queue_limit=5"]` -> `{"queue_limit": 5}`.

    Raises:
        SettingsError: one is not NAME=JSON, or a router has no such setting, or not of that type.
    """
    kinds = get_type_hints(RouterSettings, include_extras=True)
    found: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        try:
            found[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            raise SettingsError(f"{change!r} is not NAME=JSON") from None
        if not name or not equals:
            raise SettingsError(f"{change!r} is not NAME=JSON")
        if name not in kinds:
            near = nearest(name, kinds)
            raise SettingsError(
                f"--set: a router has no setting {name[:64]!r}"
                + (f"; did you mean {near}?" if near else f"; it has {', '.join(kinds)}")
            )
        try:
            msgspec.convert(found[name], kinds[name])
        except (msgspec.ValidationError, SettingsError) as error:
            raise SettingsError(f"--set: {name}: {error}") from error
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


Requests = Annotated[
    list[str] | None,
    typer.Option("--request", metavar="RID", help="Only of this request; may be repeated."),
]
Bind = Annotated[
    str, typer.Option(metavar="ENDPOINT", help="Where listeners find it. Default: a fresh one.")
]
Wait = Annotated[
    int, typer.Option(min=0, help="Begin when every stream has so many subscriptions.")
]
Stay = Annotated[bool, typer.Option("--stay", help="Go on answering after the end, until Ctrl-C.")]
Regenerates = Annotated[
    bool,
    typer.Option("--regenerate", help="Instead: ask a live fleet the same, and compare."),
]
Scores = Annotated[
    bool,
    typer.Option(
        "--score",
        help="--regenerate: sample nothing, compare what the weights say of the recorded tokens.",
    ),
]
VersionRule = Annotated[
    str,
    typer.Option(
        "--version", metavar="RULE", help="--regenerate: exact:V, min:V, latest or any weights."
    ),
]
DeadlineEach = Annotated[
    float,
    typer.Option(
        "--deadline", metavar="SECONDS", min=0.001, help="--regenerate: for each request."
    ),
]
Concurrency = Annotated[int, typer.Option(min=1, help="--regenerate: requests under way at once.")]
Tolerance = Annotated[
    float, typer.Option(min=0.0, help="--regenerate: difference of logprobs that is none.")
]


PROGRESS_EVERY_S = 0.5

app = Verbs()


@app.command(epilog=example("rolloutbus replay ./journal --speed 10 --wait 2"))
def replay(
    journal: Annotated[Path, typer.Argument(help="A directory that `record` has written.")],
    *,
    speed: Speed = "1",
    request: Requests = None,
    bind: Bind = "",
    wait: Wait = 1,
    stay: Stay = False,
    again: Regenerates = False,
    score: Scores = False,
    address: Address = "",
    key: YourKey = "",
    version: VersionRule = "any",
    deadline: DeadlineEach = 600.0,
    concurrency: Concurrency = 64,
    tolerance: Tolerance = LOGPROB_TOLERANCE,
    allow_gaps: AllowGaps = False,
    core: Core = False,
    change: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Publish the streams of a journal again, byte for byte, for any subscriber.

    Give subscribers the address that it prints, as that of a router. No message is lost: a slow
    subscriber holds the replay up. The exit status of --regenerate and --core says whether all is
    equal.
    """
    if core:
        replay_core(journal, change or [], allow_gaps=allow_gaps, as_json=as_json)
        return
    rids = frozenset(request or ())
    try:
        if again:
            wanted = Regeneration(
                *(journal, allow_gaps, rids, address, key),
                *(version, deadline, concurrency, tolerance, score),
            )
            is_equal = run(regenerate(wanted, as_json=as_json))
            raise typer.Exit(ExitStatus.OK if is_equal else ExitStatus.FAILED)
        source = Journal(journal, skip=allow_gaps)
        with _place(bind) as endpoint:
            settings = checked(lambda: PlayerSettings(endpoint, speed_of(speed), rids))
            run(_play(source, settings, wait, is_staying=stay, as_json=as_json))
        refuse_gaps(source, are_allowed=allow_gaps)
    except (JournalError, OSError) as error:
        fail_reading(error)


@contextmanager
def _place(bind: str) -> Generator[str]:
    """Where to listen: what was asked for, or a directory that only this user can enter."""
    if bind:
        yield bind
        return
    with RunDirectory() as directory:
        yield f"ipc://{directory.path / 'replay'}"


async def _play(
    source: Journal, settings: PlayerSettings, n_wanted: int, *, is_staying: bool, as_json: bool
) -> None:
    async with Player(source, settings) as player:
        sys.stderr.write(f"address: {player.address}\n")
        tell_gaps(source)
        sys.stderr.flush()
        watching = asyncio.create_task(_watch(player))
        try:
            await player.subscribed(n_wanted)
            await player.play()
            if as_json:
                print_json(_told(player, source))
            if is_staying:
                await asyncio.Event().wait()
        finally:
            watching.cancel()
            sys.stderr.write(f"{_line_start()}{line_of(player.playback)}\n")


async def _watch(player: Player) -> None:
    """Show how it goes."""
    while sys.stderr.isatty():
        sys.stderr.write(f"{_line_start()}{line_of(player.playback)}")
        sys.stderr.flush()
        await asyncio.sleep(PROGRESS_EVERY_S)


def _line_start() -> str:
    return "\r\x1b[K" if sys.stderr.isatty() else ""


def line_of(told: Playback) -> str:
    """`1,204 of 2,000 messages | 3.1 of 9.0 s | 2 subscriptions, 1 repair`."""
    waits = ""
    if not told.n_subscriptions:
        waits = " | nobody listens to every stream"
    elif told.is_held_up:
        waits = " | held up by a slow subscriber"
    return (
        f"{told.n_played:,} of {told.n_messages:,} messages | "
        f"{told.position_s:.1f} of {told.length_s:.1f} s | "
        f"{told.n_subscriptions:,} subscriptions, {told.n_repairs:,} repairs{waits}"
    )


def _told(player: Player, source: Journal) -> dict[str, object]:
    return {
        **player.playback._asdict(),
        "workers": player.workers,
        **gaps_told(source),
    }
