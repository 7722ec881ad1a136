"""Ctrl-C before there is anything to clean up."""

import contextlib
import os
import signal
from collections.abc import Generator

INTERRUPTED = 130


@contextlib.contextmanager
def leaving_at_once() -> Generator[None]:
    """Meanwhile Ctrl-C ends this process with 130: for imports, which take up to a second."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else a shell has it ignored
        signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)
