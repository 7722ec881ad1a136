"""What a command waits for while it starts: one line on stderr, for people at a terminal."""

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

LOOK_S = 0.25
PATIENCE_S = 0.5
"""What is there sooner is not worth a line."""
CLEAR = "\r\x1b[K"


def is_shown(*, quiet: bool) -> bool:
    """Whether a person sees progress."""
    return not quiet and sys.stderr.isatty()


@asynccontextmanager
async def waiting(what: Callable[[], str | None], *, quiet: bool) -> AsyncGenerator[None]:
    """Meanwhile show what is waited for, and for how long; the line is gone afterwards.

    When the body is cancelled, what it began has to end first: then that is shown.

    Args:
        what: says it, such as `w1: loading weights`; empty: nothing worth a line; None: that was
            all, and the body goes on.
        quiet: show nothing.
    """
    if not is_shown(quiet=quiet):
        yield
        return
    task = asyncio.current_task()
    assert task is not None
    showing = asyncio.create_task(
        _show(lambda: "what was started to end" if task.cancelling() else what())
    )
    try:
        yield
    finally:
        if not showing.done():
            showing.cancel()
            _write(CLEAR)


async def _show(what: Callable[[], str | None]) -> None:
    began_at = time.monotonic()
    await asyncio.sleep(PATIENCE_S)
    while (sentence := what()) is not None:
        if sentence:
            width = shutil.get_terminal_size().columns - 1
            line = f"waiting for {sentence}, {time.monotonic() - began_at:.0f} s"
            _write(f"{CLEAR}{line[:width]}")
        await asyncio.sleep(LOOK_S)
    _write(CLEAR)


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def in_words(waits_for: Mapping[str, str]) -> str:
    """`{"w0": "joining", "w1": "joining", "store": "starting"}` -> `w0, w1: joining; store: …`."""
    names: dict[str, list[str]] = {}
    for name, doing in waits_for.items():
        names.setdefault(doing, []).append(name)
    return "; ".join(f"{_listed(each)}: {doing}" for doing, each in names.items())


def _listed(names: Iterable[str]) -> str:
    first, *rest = names
    return first if not rest else f"{first}, {rest[0]}" + (" …" if rest[1:] else "")
