"""What the SGLang engine tells of its prefix cache."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from rolloutbus.bus.transport.zmq_event_feed import EventFeed
from rolloutbus.engine_worker.engines.sglang.schedulers.kv_events import KvEvents
from rolloutbus.engine_worker.engines.shared.cached_prefixes import CachedPrefixes

PAGE_TOKENS = 16
"""With pages of one token, SGLang's default, each token would be an event."""
EVENTS = "kv_events_config"
MEET_S = 30.0
"""Until a scheduler that has started is heard; a subscription takes a fraction of a second."""
PACE_S = 0.1


class PrefixFeed:
    """Hears the events of one scheduler's cache."""

    def __init__(self, endpoint: str) -> None:
        self.cached = CachedPrefixes()
        self._events = KvEvents(self.cached)
        self._has_heard = threading.Event()
        self._feed = EventFeed(endpoint, self._hear)

    @classmethod
    def among(cls, arguments: dict[str, object], folder: Path) -> Self:
        """Have an engine publish events, by the arguments it is going to be started with.

        Args:
            arguments: SGLang's; changed.
            folder: that only this user can enter.

        Raises:
            ValueError: with these arguments it cannot be.
        """
        if EVENTS in arguments:
            raise ValueError(f"arguments: {EVENTS} follows from report_prefixes; leave it out")
        if _number(arguments, "dp_size") > 1:
            raise ValueError("report_prefixes: one cache is told of, and dp_size makes several")
        endpoint = f"ipc://{folder / 'kv-events'}"
        told = {"publisher": "zmq", "endpoint": endpoint, "topic": ""}
        arguments[EVENTS] = json.dumps(told)
        if arguments.get("device") != "cpu":  # where SGLang has pages of one token only
            arguments.setdefault("page_size", PAGE_TOKENS)
        return cls(endpoint)

    def meet(self, flush: Callable[[], object]) -> None:
        """Return once the scheduler is heard: what it told before found nobody and is not repeated.

        Args:
            flush: empties the cache, of which the scheduler tells.

        Raises:
            ValueError: it was not heard in time.
        """
        end = time.monotonic() + MEET_S
        while not self._has_heard.is_set():
            if time.monotonic() > end:
                raise ValueError(f"report_prefixes: SGLang told nothing within {MEET_S:.0f} s")
            flush()
            self._has_heard.wait(PACE_S)

    def close(self) -> None:
        """Hear no more."""
        self._feed.close()

    def _hear(self, frames: Sequence[bytes]) -> None:
        self._has_heard.set()
        self._events.hear(frames)


def _number(arguments: Mapping[str, object], name: str) -> int:
    value = arguments.get(name)
    return value if isinstance(value, int) else 1
