"""Keys that are pressed at a terminal while something is shown."""

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Generator
from contextlib import contextmanager

MAX_BYTES = 64
QUIT = frozenset("qQ\x04")
ARROWS = {"A": "up", "B": "down", "C": "right", "D": "left"}
"""The last letter of what a terminal sends for each."""
ESCAPE = "\x1b"


@contextmanager
def keys(on_keys: Callable[[list[str]], None]) -> Generator[None]:
    """Calls `on_keys` with the keys pressed (see `keys_in`), unless standard input is no terminal.

    Ctrl-C stays a signal. Must be called on the event loop.
    """
    descriptor = sys.stdin.fileno() if _is_terminal() else -1
    if descriptor < 0:
        yield
        return
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def read() -> None:
        pressed = os.read(descriptor, MAX_BYTES)
        if pressed:
            on_keys(keys_in(pressed.decode(errors="replace")))
        else:  # the terminal is gone
            loop.remove_reader(descriptor)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def keys_in(text: str) -> list[str]:
    """Characters; arrows are `up`, `down`, `left` and `right`, other such keys are left out."""
    found: list[str] = []
    rest = text
    while rest:
        if rest.startswith((f"{ESCAPE}[", f"{ESCAPE}O")):
            arrow = ARROWS.get(rest[2:3])
            found += [arrow] if arrow else []
            rest = rest[3:]
        else:
            found.append(rest[0])
            rest = rest[1:]
    return found


def _is_terminal() -> bool:
    try:
        return sys.stdin.isatty()
    except ValueError:  # it is closed
        return False
