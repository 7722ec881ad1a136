"""The pages that SGLang's prefix cache keeps, from its KV events, which versions write in two ways.

Older versions write an event as a list that begins with its name, newer ones as a map with `type`.
Which fields follow is found by looking, never by comparing version numbers.
"""

import json
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, cast

import msgspec
import numpy as np

from rolloutbus.bus.transport.zmq_sockets import EventFeed
from rolloutbus.engine_worker.engines.shared.cached_prefixes import CachedPrefixes

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
FIELDS: Mapping[str, Sequence[str]] = {
    STORED: ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    REMOVED: ("block_hashes", "medium"),
    CLEARED: (),
}
"""Of the events that are lists, in their order."""
TIERS: Mapping[str | None, int] = {None: 1, "GPU": 1, "CPU_PINNED": 2}
"""Places from where a prefix comes back at once; what lies farther does not count as cached."""
SEQ_BYTES = 8
N_FRAMES = 3

Event = Mapping[str, Any]
_decode = msgspec.msgpack.Decoder().decode


class BlockNews(Protocol):
    """Hears of the pages."""

    def stored(self, key: Hashable, parent: Hashable | None, tokens: bytes, tier: int = 1) -> None:
        """A page is kept, after the page `parent`."""
        ...

    def removed(self, key: Hashable, tier: int = 1) -> None:
        """A page is kept no more."""
        ...

    def cleared(self) -> None:
        """No page is kept."""
        ...


def events_of(payload: bytes) -> Iterator[Event]:
    """The events of one batch, each as a map with its `type`.

    Raises:
        ValueError: it is no batch of events.
    """
    try:
        batch: Any = _decode(payload)
        events: list[Any] = batch[1]
    except (msgspec.DecodeError, IndexError, TypeError, KeyError) as error:
        raise ValueError(f"no batch of KV events: {error}") from error
    for event in events:
        if isinstance(event, dict):
            yield cast("Event", event)
        elif event and event[0] in FIELDS:
            yield {"type": event[0], **dict(zip(FIELDS[event[0]], event[1:], strict=False))}


class KvEvents:
    """Passes on what one publisher of SGLang's tells; messages come in order, or are missing."""

    def __init__(self, news: BlockNews) -> None:
        self._news = news
        self._next_seq = 0
        self.n_missed = 0
        """Messages that did not come."""

    def hear(self, frames: Sequence[bytes]) -> None:
        """One message: topic, number, batch."""
        if len(frames) != N_FRAMES or len(frames[1]) != SEQ_BYTES:
            return
        seq = int.from_bytes(frames[1], "big")
        if seq != self._next_seq:
            # Something may have been evicted without our hearing of it.
            self.n_missed += abs(seq - self._next_seq)
            self._news.cleared()
        self._next_seq = seq + 1
        try:
            for event in events_of(frames[2]):
                self._pass_on(event)
        except (ValueError, KeyError, TypeError):
            # Written in a third way: as much as not heard.
            self.n_missed += 1
            self._news.cleared()

    def _pass_on(self, event: Event) -> None:
        tier = TIERS.get(event.get("medium"))
        match event.get("type"):
            case "BlockStored" if tier is not None and event.get("lora_name") is None:
                self._stored(event, tier)
            case "BlockRemoved" if tier is not None:
                for key in event["block_hashes"]:
                    self._news.removed(key, tier)
            case "AllBlocksCleared":
                self._news.cleared()
            case _:
                pass

    def _stored(self, event: Event, tier: int) -> None:
        tokens: Sequence[Any] = event["token_ids"]
        if tokens and not isinstance(tokens[0], int):
            tokens = [pair[0] for pair in tokens]  # speculative decoding keeps pairs of neighbours
        size: int = event["block_size"]
        parent: Hashable | None = event["parent_block_hash"]
        for n, key in enumerate(event["block_hashes"]):
            page = np.array(tokens[n * size : (n + 1) * size], "<i4").tobytes()
            self._news.stored(key, parent, page, tier)
            parent = key


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
        for name in ("dp_size", "pp_size"):
            if _number(arguments, name) > 1:
                raise ValueError(f"report_prefixes: one cache is told of, and {name} makes several")
        endpoint = f"ipc://{folder / 'kv-events'}"
        config = {"publisher": "zmq", "endpoint": endpoint, "topic": ""}
        arguments[EVENTS] = json.dumps(config)
        if arguments.get("device") != "cpu":  # where SGLang has pages of one token only
            arguments.setdefault("page_size", PAGE_TOKENS)
        return cls(endpoint)

    def meet(self, flush: Callable[[], object]) -> None:
        """Return once the scheduler is heard: events sent before are not repeated.

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
