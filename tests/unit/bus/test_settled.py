"""What is over is remembered within bounds of time and number."""

from rolloutbus.bus.membership.tombstones import SETTLED_S, SettledRequests


def test_the_oldest_are_forgotten_first_beyond_the_number() -> None:
    over = SettledRequests(2)
    for rid in ("c/1", "c/2", "c/1", "c/3"):
        over.add(rid, 0.0)
    assert list(over) == ["c/1", "c/3"]


def test_memory_ends_after_its_time() -> None:
    over = SettledRequests()
    over.add("c/1", 0.0)
    over.add("c/2", 5.0)
    over.expire(SETTLED_S + 1)
    assert ("c/1" in over, "c/2" in over, len(over)) == (False, True, 1)
