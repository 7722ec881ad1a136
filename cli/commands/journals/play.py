"""`rolloutbus play`: a recording in the terminal, with keys."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rolloutbus.cli.commands.journals.gaps import AllowGaps, fail_reading, refuse_gaps, tell_gaps
from rolloutbus.cli.commands.tail import Decode, StreamTexts, as_line, drawn, ids_of, listed
from rolloutbus.cli.keyboard import QUIT, keys
from rolloutbus.cli.options import AsJson, Speed, example, speed_of
from rolloutbus.cli.terminal import checked, print_json, run
from rolloutbus.cli.verbs import Verbs
from rolloutbus.replay.choice import Filter
from rolloutbus.replay.journal.format import JournalError
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.player_core import JournalSurvey
from rolloutbus.replay.scenes import Scene, scenes
from rolloutbus.trainer_adapter.client.text import load_tokenizer

FRAME_S = 0.1
SKIP_S = 5.0
HINT = "space: pause | up, down: speed | left, right: 5 s, paused: one step | q: quit"

app = Verbs()


class Playhead:
    """Where a recording is being watched, and how fast it moves."""

    def __init__(self, length_s: float, speed: float) -> None:
        self.length_s = length_s
        self.position_s = 0.0
        self.speed = speed
        self.is_paused = False
        self.is_over = False
        """The watcher has had enough."""
        self.steps = 0
        """Moments to show although it is paused."""

    def advance(self, seconds: float) -> None:
        """So much time has passed for who watches."""
        if seconds > 0 and not self.is_paused:
            self.move(seconds * self.speed)

    def move(self, seconds: float) -> None:
        """Go on, or back, by so many seconds of the recording."""
        self.position_s = min(self.length_s, max(0.0, self.position_s + seconds))

    def press(self, key: str) -> None:
        """Do what a key says; see HINT."""
        match key:
            case " ":
                self.is_paused = not self.is_paused
            case "up":
                self.speed *= 2
            case "down":
                self.speed /= 2
            case "right" if self.is_paused:
                self.steps += 1
            case "right":
                self.move(SKIP_S)
            case "left":
                self.move(-SKIP_S)
            case _:
                self.is_over = self.is_over or key in QUIT


class Show:
    """The streams as they stood at the playhead."""

    def __init__(self, film: Callable[[], Iterator[Scene]], head: Playhead, decode: Decode) -> None:
        self._film = film
        self._head = head
        self._decode = decode
        self._rewind()

    def _rewind(self) -> None:
        self.texts = StreamTexts(self._decode)
        self._rest = self._film()
        self._next = next(self._rest, None)
        self._shown_s = 0.0

    @property
    def is_at_end(self) -> bool:
        """Whether nothing is left to be shown."""
        return self._next is None and self._head.position_s >= self._head.length_s

    def catch_up(self) -> list[str]:
        """Take in what lies before the playhead; returns what to say of streams that have ended."""
        head = self._head
        if head.position_s < self._shown_s:
            self._rewind()
        if head.steps and self._next is not None:
            head.steps -= 1
            head.position_s = self._next.at_s
        said: list[str] = []
        while self._next is not None and self._next.at_s <= head.position_s:
            said += filter(None, map(self.texts.heard, self._next.events))
            self._next = next(self._rest, None)
        self._shown_s = head.position_s
        return said

    def drawn(self, width: int) -> Group:
        """Open streams and the line of the playhead."""
        head = self._head
        state = "paused" if head.is_paused else f"{head.speed:g} times as fast as it was"
        line = f"{head.position_s:.1f} of {head.length_s:.1f} s | {state}"
        foot = [Text(each, "dim", no_wrap=True, overflow="ellipsis") for each in (line, HINT)]
        return Group(drawn(self.texts, width), *foot)


@app.command(epilog=example("rolloutbus play ./journal --tokenizer ./model --speed 4"))
def play(
    journal: Annotated[Path, typer.Argument(help="A directory that `record` has written.")],
    *,
    speed: Speed = "1",
    client: Annotated[
        list[str] | None, typer.Option("--client", help="Of this client; may be repeated.")
    ] = None,
    rid: Annotated[list[str] | None, typer.Option("--rid", help="This request.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json, or the model directory with it.")
    ] = None,
    allow_gaps: AllowGaps = False,
    as_json: AsJson = False,
) -> None:
    """Watch a recording in the terminal as `tail` shows a fleet.

    Space pauses, the arrows up and down change the speed, right and left go 5 s on and back (or one
    step on while it is paused), q ends it. With --json, or without a terminal, everything is
    printed at that speed. To publish it for subscribers see `replay`.
    """
    loaded = checked(partial(load_tokenizer, tokenizer)) if tokenizer else None
    decode = partial(loaded.decode, skip_special_tokens=False) if loaded else ids_of
    wanted = Filter(client=client or [])
    head = Playhead(0.0, checked(partial(speed_of, speed)))
    try:
        source = Journal(journal, skip=allow_gaps)
        film = partial(scenes, source, wanted, rid or ())
        survey = JournalSurvey()
        for record in source:
            survey.add(record)
        head.length_s = survey.length_s
        shown = _print_json(film(), head) if as_json else _show(film, head, decode)
        run(shown)
    except (JournalError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        fail_reading(error)
    tell_gaps(source)
    refuse_gaps(source, are_allowed=allow_gaps)


async def _print_json(film: Iterator[Scene], head: Playhead) -> None:
    for at_s, events in film:
        await asyncio.sleep(max(0.0, at_s - head.position_s) / head.speed)
        head.position_s = at_s
        for event in events:
            print_json({"at_s": round(at_s, 3), **as_line(event)}, listed)


async def _show(film: Callable[[], Iterator[Scene]], head: Playhead, decode: Decode) -> None:
    show = Show(film, head, decode)
    if not sys.stdout.isatty():
        while not show.is_at_end:
            head.advance(FRAME_S)
            sys.stdout.writelines(f"{each}\n" for each in show.catch_up())
            sys.stdout.flush()
            await asyncio.sleep(FRAME_S if head.speed < float("inf") else 0.0)
        return
    await _watch(show, head)


async def _watch(show: Show, head: Playhead) -> None:
    """Until q, or until the end is reached and a key says so."""
    console, loop = Console(), asyncio.get_running_loop()
    pressed = asyncio.Event()

    def on_keys(some: list[str]) -> None:
        for key in some:
            head.press(key)
        pressed.set()

    with Live(console=console, auto_refresh=False, transient=True) as live, keys(on_keys):
        looked_at = loop.time()
        while not head.is_over and not (show.is_at_end and not sys.stdin.isatty()):
            now = loop.time()
            head.advance(now - looked_at)
            looked_at = now
            for said in show.catch_up():
                first, _, body = said.partition("\n")
                console.print(Text(first, "bold"), Text(body), sep="\n")
            live.update(show.drawn(console.width), refresh=True)
            pressed.clear()
            try:
                async with asyncio.timeout(FRAME_S):
                    await pressed.wait()
            except TimeoutError:
                continue
