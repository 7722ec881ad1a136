"""SGLang's KV events: which pages its prefix cache keeps, in the two ways that versions write them.

Older versions write an event as a list that begins with its name, newer ones as a map with `type`.
Which fields follow is found by looking, never by comparing version numbers.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec
import numpy as np

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
