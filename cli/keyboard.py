"""Keys that are pressed while a command runs; the terminal is left as it was found."""

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Generator
from contextlib import contextmanager

MAX_KEYS = 64


@contextmanager
def keys(on_keys: Callable[[str], None]) -> Generator[None]:
    """Be told of each key as it is pressed, unless standard input is no terminal.

    Ctrl-C stays a signal. Must be called on the event loop.
    """
    descriptor = sys.stdin.fileno() if _is_terminal() else -1
    if descriptor < 0:
        yield
        return
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def read() -> None:
        pressed = os.read(descriptor, MAX_KEYS)
        if pressed:
            on_keys(pressed.decode(errors="replace"))
        else:  # the terminal is gone
            loop.remove_reader(descriptor)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _is_terminal() -> bool:
    try:
        return sys.stdin.isatty()
    except ValueError:  # it is closed
        return False
