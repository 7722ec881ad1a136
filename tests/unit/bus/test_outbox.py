"""Endings wait for acknowledgements, within bounds."""

from msgspec import Raw

from rolloutbus.bus.membership.outbox import (
    HEADER_BYTES,
    MAX_AGE_S,
    MAX_ENTRIES_PER_TICK,
    MAX_NEWS,
    Outbox,
)
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.endings import Problem


def ending(n: int, size_bytes: int = 10) -> Entry:
    return Entry("finished", f"c/{n}", (1, 1), "e.1", "client", body=Raw(b"x" * size_bytes))


def due(outbox: Outbox, now: float, epoch: str = "e.1") -> list[str]:
    return [entry.rid for entry in outbox.due(epoch, now)]


def test_ending_is_sent_again_with_growing_waits() -> None:
    outbox = Outbox(LeaseSettings())
    outbox.put("generate", ending(1), 0.0)
    moments = [now / 10 for now in range(200) if due(outbox, now / 10)]
    assert moments == [1.0, 2.5, 4.8, 8.2, 13.2, 18.2]


def test_acknowledged_ending_is_forgotten() -> None:
    outbox = Outbox(LeaseSettings())
    outbox.put("generate", ending(1), 0.0)
    outbox.drop([("c/1", (1, 1))])
    assert (len(outbox), outbox.size_bytes, due(outbox, 9.0)) == (0, 0, [])


def test_hello_makes_everything_due_under_the_new_epoch() -> None:
    outbox = Outbox(LeaseSettings())
    outbox.put("generate", ending(1), 0.0)
    outbox.put("generate", ending(2), 0.0)
    outbox.due_now(None, 0.1)
    assert [(e.rid, e.epoch) for e in outbox.due("e.2", 0.1)] == [("c/1", "e.2"), ("c/2", "e.2")]
    assert due(outbox, 0.2) == []


def test_too_many_bytes_cost_the_oldest_results_but_not_their_endings() -> None:
    outbox = Outbox(LeaseSettings(), limit_bytes=2 * (1000 + HEADER_BYTES))
    for n in range(3):
        outbox.put("generate", ending(n, 1000), 0.0)
    outbox.due_now(None, 1.0)
    kinds = {entry.rid: entry for entry in outbox.due("e.1", 1.0)}
    problem = unpack(kinds["c/0"])
    assert isinstance(problem, Problem)
    assert problem.code == "internal"
    assert kinds["c/2"].kind == "finished"
    assert outbox.n_overflows >= 1


def test_ending_that_nobody_fetches_is_dropped_at_last() -> None:
    outbox = Outbox(LeaseSettings())
    outbox.put("generate", ending(1), 0.0)
    assert due(outbox, MAX_AGE_S + 10) == []
    assert len(outbox) == 0


def test_small_endings_alone_are_bounded_too_and_the_oldest_go_first() -> None:
    limit_bytes = 1000 * HEADER_BYTES
    outbox = Outbox(LeaseSettings(), limit_bytes)
    for n in range(100_000):
        outbox.put("generate", ending(n), 0.0)
    assert outbox.size_bytes <= limit_bytes
    assert 0 < len(outbox) < 1000
    assert ("c/99999", (1, 1)) in outbox
    assert outbox.n_overflows == 100_000 - len(outbox)


def of(client: str, n: int, size_bytes: int = 10) -> Entry:
    body = Raw(b"x" * size_bytes)
    return Entry("finished", f"{client}/{n}", (1, 1), "e.1", client, body=body)


def test_news_are_told_once_and_what_came_and_went_meanwhile_is_none() -> None:
    outbox = Outbox(LeaseSettings())
    outbox.put("generate", ending(1), 0.0)
    outbox.put("generate", ending(2), 0.0)
    assert outbox.take_news() == (True, [(f"c/{n}", (1, 1), "client") for n in (1, 2)], [])
    assert outbox.take_news() == (False, [], [])
    outbox.put("generate", ending(3), 0.0)
    outbox.drop([("c/1", (1, 1)), ("c/3", (1, 1))])
    assert outbox.take_news() == (False, [], [("c/1", (1, 1))])
    outbox.report_all()
    assert outbox.take_news() == (True, [("c/2", (1, 1), "client")], [])


def test_news_of_a_large_outbox_take_several_heartbeats() -> None:
    outbox = Outbox(LeaseSettings())
    for n in range(2 * MAX_NEWS + 1):
        outbox.put("generate", ending(n), 0.0)
    parts = [outbox.take_news() for _ in range(4)]
    assert [len(part.came) for part in parts] == [MAX_NEWS, MAX_NEWS, 1, 0]
    assert [part.is_whole for part in parts] == [True, False, False, False]


def test_a_full_outbox_costs_whoever_filled_it() -> None:
    outbox = Outbox(LeaseSettings(), limit_bytes=100_000)
    outbox.put("generate", of("modest", 1, 5000), 0.0)
    for n in range(1000):
        outbox.put("generate", of("greedy", n, 5000), 0.0)
    kept = outbox.get(("modest/1", (1, 1)))
    assert kept is not None
    assert kept.has_result
    assert outbox.size_bytes <= 100_000
    assert [row[0] for row in outbox.backlog()] == ["greedy"]


def test_few_are_sent_again_at_once() -> None:
    outbox = Outbox(LeaseSettings())
    for n in range(5000):
        outbox.put("generate", ending(n), 0.0)
    assert len(due(outbox, 2.0)) == MAX_ENTRIES_PER_TICK
