"""SGLang's KV events, in the two ways that its versions write them."""

from typing import Any

import msgspec
import numpy as np
import pytest

from rolloutbus.bus.prefix_hashes import marks_of, unpacked
from rolloutbus.engine_worker.engines.sglang.prefixes import KvEvents, events_of
from rolloutbus.engine_worker.engines.shared.cached_prefixes import CachedPrefixes

TOKENS: list[int] = np.random.default_rng(5).integers(0, 512, 192).tolist()
PAGE = 64
HASHES = [-5, 2**62, 17]
STORED, REMOVED = "BlockStored", "BlockRemoved"


def as_list(kind: str, **fields: Any) -> list[Any]:  # noqa: ANN401 - of an event
    order = {
        STORED: ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
        REMOVED: ("block_hashes",),
    }.get(kind, ())
    return [kind, *(fields.get(name) for name in order), *([fields["medium"]] if order else [])]


def as_map(kind: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - of an event
    return {"type": kind, **fields}


WRITERS = pytest.mark.parametrize("write", [as_list, as_map])


class Publisher:
    """One that numbers its messages."""

    def __init__(self) -> None:
        self.cached = CachedPrefixes()
        self.events = KvEvents(self.cached)
        self.seq = 0

    def publish(self, *events: Any) -> None:  # noqa: ANN401 - lists or maps
        payload = msgspec.msgpack.encode([1.5, list(events), 0])
        self.events.hear([b"", self.seq.to_bytes(8, "big"), payload])
        self.seq += 1

    def news(self) -> tuple[int, set[int], set[int]]:
        told = self.cached.take()
        assert told is not None
        return told.seq, set(unpacked(told.added)), set(unpacked(told.removed))


def pages(write: Any, medium: str = "GPU", first: int = 0, **more: Any) -> list[Any]:  # noqa: ANN401 - an event each
    return [
        write(
            STORED,
            block_hashes=[HASHES[n]],
            parent_block_hash=HASHES[n - 1] if n else None,
            token_ids=TOKENS[n * PAGE : (n + 1) * PAGE],
            block_size=PAGE,
            medium=medium,
            **more,
        )
        for n in range(first, len(HASHES))
    ]


def marks(n_tokens: int = len(TOKENS)) -> set[int]:
    return set(unpacked(marks_of(np.array(TOKENS[:n_tokens], "<i4").tobytes())))


@WRITERS
def test_stored_pages_are_cached_and_removed_ones_are_not(write: Any) -> None:  # noqa: ANN401
    publisher = Publisher()
    publisher.publish(*pages(write))
    assert publisher.news() == (0, marks(), set())
    publisher.publish(write(REMOVED, block_hashes=HASHES[1:], medium="GPU"))
    assert publisher.news() == (1, set(), marks() - marks(PAGE))


@WRITERS
def test_a_cleared_cache_has_nothing(write: Any) -> None:  # noqa: ANN401
    publisher = Publisher()
    publisher.publish(*pages(write))
    publisher.news()
    publisher.publish(write("AllBlocksCleared"))
    assert publisher.news() == (0, set(), set())


def test_one_event_may_hold_a_chain_of_pages() -> None:
    publisher = Publisher()
    event = as_map(
        STORED, block_hashes=HASHES, parent_block_hash=None, token_ids=TOKENS, block_size=PAGE
    )
    publisher.publish(event)
    assert publisher.news()[1] == marks()


def test_a_page_in_host_memory_is_still_cached() -> None:
    publisher = Publisher()
    publisher.publish(*pages(as_list), *pages(as_list, "CPU_PINNED"))
    publisher.news()
    publisher.publish(as_list(REMOVED, block_hashes=HASHES, medium="GPU"))
    assert publisher.cached.take() is None
    publisher.publish(as_list(REMOVED, block_hashes=HASHES, medium="CPU_PINNED"))
    assert publisher.news()[2] == marks()


def test_what_lies_farther_than_host_memory_does_not_count() -> None:
    publisher = Publisher()
    publisher.publish(*pages(as_map, "DISK"))
    assert publisher.cached.take() is None


def test_pages_of_an_adapter_do_not_count() -> None:
    publisher = Publisher()
    publisher.publish(*pages(as_map, lora_name="math"))
    assert publisher.cached.take() is None


def test_pages_of_pairs_of_neighbours_hold_the_first_of_each() -> None:
    publisher = Publisher()
    pairs = [list(pair) for pair in zip(TOKENS, [*TOKENS[1:], 0], strict=True)]
    publisher.publish(
        as_list(
            STORED,
            block_hashes=HASHES[:1],
            parent_block_hash=None,
            token_ids=pairs[:PAGE],
            block_size=PAGE,
            medium="GPU",
        )
    )
    assert publisher.news()[1] == marks(PAGE)


def test_after_a_missed_message_nothing_from_before_is_believed() -> None:
    publisher = Publisher()
    publisher.publish(*pages(as_list)[:2])
    publisher.news()
    publisher.seq += 3
    publisher.publish(*pages(as_list, first=2))
    assert publisher.events.n_missed == 3
    assert publisher.news() == (0, set(), set())


def test_events_of_kinds_to_come_are_passed_over() -> None:
    publisher = Publisher()
    publisher.publish(["BlockMoved", 1], as_map("BlockMoved", to="DISK"), *pages(as_list))
    assert publisher.news()[1] == marks()


@pytest.mark.parametrize("frames", [[b"x"], [b"", b"1", b"\x90"], []])
def test_messages_of_another_shape_are_passed_over(frames: list[bytes]) -> None:
    publisher = Publisher()
    publisher.events.hear(frames)
    assert publisher.cached.take() is None


@pytest.mark.parametrize("broken", [3, {"type": STORED}, as_list(REMOVED, medium="GPU")])
def test_after_an_event_of_another_shape_nothing_from_before_is_believed(broken: Any) -> None:  # noqa: ANN401
    publisher = Publisher()
    publisher.publish(*pages(as_list))
    publisher.news()
    publisher.publish(broken)
    assert publisher.events.n_missed == 1
    assert publisher.news() == (0, set(), set())


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x01", b"\x91\x01", b"\x80"])
def test_what_is_no_batch_is_an_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match="no batch"):
        list(events_of(payload))
