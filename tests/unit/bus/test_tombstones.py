"""What is over stays over, within bounds of time and number."""

from rolloutbus.bus.membership.tombstones import ABORTED, Tombstones


def test_highest_attempt_wins_whatever_the_order() -> None:
    tombstones = Tombstones(10.0)
    tombstones.put("c/1", (1, 2), 0.0)
    tombstones.put("c/1", (1, 1), 1.0)
    assert tombstones.get("c/1") == (1, 2)


def test_abort_stands_for_every_attempt() -> None:
    tombstones = Tombstones(10.0)
    tombstones.put("c/1", ABORTED, 0.0)
    tombstones.put("c/1", (9, 9), 0.0)
    assert tombstones.get("c/1") == ABORTED


def test_memory_ends_after_its_time_counted_from_the_last_mention() -> None:
    tombstones = Tombstones(10.0)
    tombstones.put("c/1", (1, 1), 0.0)
    tombstones.put("c/2", (1, 1), 1.0)
    tombstones.put("c/1", (1, 1), 5.0)
    tombstones.expire(11.5)
    assert (tombstones.get("c/1"), tombstones.get("c/2")) == ((1, 1), None)


def test_number_is_bounded_oldest_first() -> None:
    tombstones = Tombstones(10.0, limit=2)
    for n in range(3):
        tombstones.put(f"c/{n}", (1, 1), 0.0)
    assert (len(tombstones), tombstones.get("c/0")) == (2, None)
