"""A timetable says each thing once, at the last time it was set to."""

from rolloutbus.bus.timetable import Timetable


def test_keys_come_due_in_order_of_time_and_once() -> None:
    table: Timetable[str] = Timetable()
    table.set("b", 2.0)
    table.set("a", 1.0)
    assert table.due(0.5) == []
    assert table.due(2.0) == ["a", "b"]
    assert table.due(9.0) == []


def test_setting_again_moves_and_cancelling_removes() -> None:
    table: Timetable[str] = Timetable()
    table.set("a", 1.0)
    table.set("b", 1.0)
    table.set("a", 3.0)
    table.cancel("b")
    table.cancel("unknown")
    assert table.due(2.0) == []
    assert table.due(3.0) == ["a"]


def test_cancelled_keys_do_not_pile_up() -> None:
    table: Timetable[int] = Timetable()
    for key in range(100_000):
        table.set(key, 1e9)
        table.cancel(key)
    assert len(table) == 0
    assert len(table._heap) < 3000  # pyright: ignore[reportPrivateUsage] - the bound is the point
