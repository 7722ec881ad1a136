"""A worker passes on to its router what its engine has cached."""

from rolloutbus.bus.prefix_hashes import packed, unpacked
from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.membership import Prefixes, Welcome
from tests.unit.engine_worker.core_bench import Bench


def joined() -> Bench:
    bench = Bench()
    bench.join()
    return bench


def cached(bench: Bench, seq: int, added: list[int], removed: list[int] | None = None) -> None:
    body = Prefixes(seq, packed(added), packed(removed or []))
    bench.host(Entry("prefixes", body=pack(body)))


def told(bench: Bench) -> list[tuple[int, set[int], set[int]]]:
    """(seq, added, removed) of what was said so far, each under the present lease."""
    found: list[tuple[int, set[int], set[int]]] = []
    for entry in bench.said.sent("prefixes"):
        body = unpack(entry)
        assert isinstance(body, Prefixes)
        assert entry.epoch.startswith("b0" * 16)
        found.append((body.seq, set(unpacked(body.added)), set(unpacked(body.removed))))
    return found


def test_what_the_host_tells_reaches_the_router() -> None:
    bench = joined()
    cached(bench, 0, [1, 2])
    bench.pass_time(0.5)
    cached(bench, 1, [3], [1])
    bench.pass_time(0.5)
    assert told(bench) == [(0, {1, 2}, set()), (1, {3}, {1})]


def test_nothing_is_said_by_a_worker_whose_engine_tells_nothing() -> None:
    bench = joined()
    bench.pass_time(3.0)
    assert told(bench) == []


def test_news_of_a_busy_cache_is_said_at_a_bounded_pace() -> None:
    bench = joined()
    for n in range(40):
        cached(bench, n, [n])
        bench.pass_time(0.05)
    assert len(told(bench)) <= 2.0 / 0.25 + 1


def test_a_fresh_connection_is_told_everything() -> None:
    bench = joined()
    cached(bench, 0, [1, 2])
    bench.pass_time(0.5)
    bench.collect(bench.core.link_down(bench.now))
    bench.pass_time(1.0)
    bench.router(Entry("welcome", body=pack(Welcome(1, "r", 1, []))))
    bench.lease()
    bench.pass_time(0.5)
    assert told(bench)[1:] == [(0, {1, 2}, set())]


def test_a_cleared_cache_is_cleared_at_the_router() -> None:
    bench = joined()
    cached(bench, 0, [1, 2])
    bench.pass_time(0.5)
    cached(bench, 0, [])
    bench.pass_time(0.5)
    assert told(bench)[1:] == [(0, set(), set())]


def test_nothing_of_a_dead_engine_is_told_under_the_next_lease() -> None:
    bench = joined()
    cached(bench, 0, [1, 2])
    bench.pass_time(0.5)
    bench.collect(bench.core.host_exited("killed", bench.now, was_killed=True))
    bench.join()
    cached(bench, 0, [9])
    bench.pass_time(0.5)
    assert told(bench)[1:] == [(0, {9}, set())]
