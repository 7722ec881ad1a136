"""Which worker gets a prompt whose beginning somebody has cached."""

from typing import Any

import pytest

from rolloutbus.bus.prefix_hashes import packed
from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.generation import OpenSession
from rolloutbus.bus.wire.messages.membership import Prefixes
from rolloutbus.router.placement.prefixes import MARKS_PER_WORKER, MAX_EXPECTED, REQUEST_TOKENS
from tests.unit.router.harness import Bus, SimClient, SimWorker

PROMPT = list(range(1, 13))
"""Marks of a prompt of 1024 tokens: units 1 to 8, 10, 12, 14 and 16."""
N_TOKENS = 1024


def tell(
    worker: SimWorker, added: list[int], removed: list[int] | None = None, seq: int = 0
) -> None:
    body = Prefixes(seq, packed(added), packed(removed or []))
    worker.say(Entry("prefixes", epoch=worker.epoch, body=pack(body)))


def ask(client: SimClient, marks: list[int], **place: Any) -> None:  # noqa: ANN401 - fields of Placement
    client.generate(marks=packed(marks), **place)


def fleet(
    n_workers: int = 4,
    slots: int = 8,
    **facts: Any,  # noqa: ANN401 - fields of WorkerFacts
) -> tuple[Bus, list[SimWorker], SimClient]:
    bus = Bus()
    workers = [bus.worker(f"w{n}", slots=slots, **facts) for n in range(n_workers)]
    return bus, workers, bus.client()


def counts(workers: list[SimWorker]) -> list[int]:
    return [len(worker.take("generate")) for worker in workers]


def test_a_prompt_goes_where_most_of_it_is_cached() -> None:
    _, workers, client = fleet()
    tell(workers[1], PROMPT[:4])
    tell(workers[2], PROMPT)
    for _ in range(5):
        ask(client, PROMPT)
    assert counts(workers) == [0, 0, 5, 0]


def test_a_longer_prompt_goes_where_its_beginning_is_cached() -> None:
    _, workers, client = fleet()
    tell(workers[3], PROMPT)
    ask(client, [*PROMPT, 900, 901])
    assert counts(workers) == [0, 0, 0, 1]


def test_a_prompt_that_nobody_has_goes_to_the_less_loaded() -> None:
    _, workers, client = fleet(2)
    tell(workers[0], PROMPT)
    for n in range(8):
        ask(client, [100 + n])
    assert all(counts(workers))


def test_a_long_beginning_that_all_share_does_not_keep_a_worker_cold() -> None:
    _, workers, client = fleet(2, slots=100)
    everybody = list(range(1, 32))
    tell(workers[0], everybody)
    for _ in range(40):
        ask(client, everybody)
    assert min(counts(workers)) >= 15


def test_no_cache_is_worth_a_queue_while_another_worker_has_a_slot() -> None:
    _, workers, client = fleet(2, slots=4)
    tell(workers[0], PROMPT)
    for _ in range(8):
        ask(client, PROMPT)
    assert counts(workers) == [4, 4]


@pytest.mark.parametrize("cost", [N_TOKENS, 100 * N_TOKENS])
def test_requests_outweigh_a_cache_whatever_they_may_sample(cost: int) -> None:
    _, workers, client = fleet(2, slots=64)
    tell(workers[0], PROMPT)
    n_worth = N_TOKENS // REQUEST_TOKENS
    for _ in range(n_worth):
        ask(client, PROMPT, cost=cost)
    assert counts(workers) == [n_worth, 0]
    for _ in range(n_worth):
        ask(client, PROMPT, cost=cost)
    assert counts(workers)[1] > 0


def test_a_full_worker_gets_nothing_more_for_its_cache() -> None:
    bus = Bus()
    warm, cold = bus.worker("w0", slots=1), bus.worker("w1", slots=1)
    client = bus.client()
    tell(warm, PROMPT)
    for _ in range(4):
        ask(client, PROMPT, cost=1)
    assert counts([warm, cold]) == [2, 2]


def test_a_session_stays_where_it_is_whatever_is_cached_elsewhere() -> None:
    _, workers, client = fleet(2)
    client.generate(session="chat")
    home = next(n for n, count in enumerate(counts(workers)) if count)
    tell(workers[1 - home], PROMPT)
    ask(client, PROMPT, session="chat")
    assert counts(workers)[home] == 1


def test_a_session_that_must_move_goes_where_its_history_is_cached() -> None:
    _, workers, client = fleet()
    client.ask("open_session", OpenSession("chat"), deadline_s=5)
    ask(client, PROMPT, session="chat")
    home = next(worker for worker in workers if worker.take("generate"))
    others = [worker for worker in workers if worker is not home]
    tell(others[1], PROMPT)
    home.state = "draining"
    home.heartbeat()
    ask(client, PROMPT, session="chat")
    assert counts(others) == [0, 1, 0]


def test_a_group_begins_where_its_prompt_is_cached() -> None:
    _, workers, client = fleet()
    tell(workers[1], PROMPT)
    for _ in range(4):
        ask(client, PROMPT, group="g")
    assert counts(workers) == [0, 4, 0, 0]


def test_groups_with_one_beginning_are_spread_by_their_number() -> None:
    _, workers, client = fleet(2, slots=64)
    for worker in workers:
        tell(worker, PROMPT)
    for number in range(8):
        for _ in range(4):
            ask(client, PROMPT, group=f"g{number}", cost=8_000 if number % 4 else 2_000)
    assert counts(workers) == [16, 16]


def test_a_cache_of_a_version_that_does_not_do_is_of_no_use() -> None:
    bus = Bus()
    old, new = bus.worker("w0", version=1), bus.worker("w1", version=3)
    client = bus.client()
    tell(old, PROMPT)
    client.generate("min:3", marks=packed(PROMPT))
    assert counts([old, new]) == [0, 1]


def test_what_was_evicted_is_looked_for_no_more() -> None:
    _, workers, client = fleet()
    tell(workers[0], PROMPT)
    tell(workers[1], PROMPT[:6])
    tell(workers[0], [], PROMPT, seq=1)
    ask(client, PROMPT)
    assert counts(workers) == [0, 1, 0, 0]


def test_a_worker_that_begins_anew_has_nothing_of_what_it_told_before() -> None:
    bus, workers, client = fleet()
    tell(workers[0], PROMPT)
    tell(workers[1], PROMPT[:2])
    tell(workers[0], [77])
    ask(client, PROMPT)
    assert counts(workers) == [0, 1, 0, 0]
    assert bus.core.status(bus.now).workers[0].n_marks == 1


def test_a_gap_makes_the_router_forget_until_the_worker_begins_anew() -> None:
    bus, workers, client = fleet()
    tell(workers[1], PROMPT[:2])
    tell(workers[0], PROMPT)
    tell(workers[0], [200], seq=2)
    tell(workers[0], PROMPT, seq=3)
    ask(client, PROMPT)
    assert counts(workers) == [0, 1, 0, 0]
    assert bus.counters["prefix_gaps"] == 2
    tell(workers[0], PROMPT)
    ask(client, PROMPT)
    assert counts(workers) == [1, 0, 0, 0]


def test_nothing_told_outlives_the_lease() -> None:
    bus, workers, _ = fleet()
    tell(workers[0], PROMPT)
    workers[0].is_alive = False
    bus.advance(4)
    again = bus.worker("w0")
    tell(again, [5], seq=1)
    assert [each.n_marks for each in bus.core.status(bus.now).workers if each.name == "w0"] == [0]


def test_words_of_an_earlier_lease_are_not_believed() -> None:
    bus, workers, _ = fleet(1)
    body = pack(Prefixes(0, packed(PROMPT)))
    workers[0].say(Entry("prefixes", epoch="another.1", body=body))
    assert bus.core.status(bus.now).workers[0].n_marks == 0
    assert bus.counters["stale_prefixes"] == 1


def test_clients_are_asked_for_marks_only_while_a_worker_tells_of_its_cache() -> None:
    bus, workers, client = fleet(1)
    assert not unpack(client.take("welcome")[-1]).marks  # type: ignore[attr-defined] - a Welcome
    tell(workers[0], PROMPT)
    bus.advance(0.5)
    assert unpack(client.take("members")[-1]).marks  # type: ignore[attr-defined] - Members
    assert bus.client("other").take_body("welcome").marks
    workers[0].is_alive = False
    bus.advance(4)
    assert not unpack(client.take("members")[-1]).marks  # type: ignore[attr-defined] - Members


def test_what_a_router_keeps_of_one_worker_is_bounded() -> None:
    bus, workers, _ = fleet(1)
    n_told = MARKS_PER_WORKER + 1000
    for seq, start in enumerate(range(0, n_told, 1000)):
        tell(workers[0], list(range(start, min(n_told, start + 1000))), seq=seq)
    assert bus.core.status(bus.now).workers[0].n_marks == MARKS_PER_WORKER
    assert bus.counters["prefixes_not_kept"] == 1000


def test_of_many_workers_with_the_same_beginning_all_get_some() -> None:
    bus = Bus()
    workers = [bus.worker(f"w{n}", slots=32) for n in range(40)]
    client = bus.client()
    for worker in workers:
        tell(worker, PROMPT)
    for _ in range(400):
        ask(client, PROMPT)
    assert max(counts(workers)) <= 20


def test_requests_of_one_burst_find_what_the_first_of_them_will_have_cached() -> None:
    _, workers, client = fleet()
    for n, worker in enumerate(workers):
        tell(worker, [500 + n])
    for _ in range(6):
        ask(client, PROMPT)
    assert sorted(counts(workers)) == [0, 0, 0, 6]


def test_what_a_worker_is_expected_to_have_is_bounded_and_not_shown() -> None:
    bus, (worker,), client = fleet(1)
    tell(worker, [1])
    for n in range(MAX_EXPECTED // 32 + 40):
        ask(client, list(range(1000 + 32 * n, 1032 + 32 * n)))
        (command,) = worker.take("generate")
        worker.end(command)
    member = bus.core.context.members.named("w0")
    assert member is not None
    assert len(member.marks) == MAX_EXPECTED + 1
    assert bus.core.status(bus.now).workers[0].n_marks == 1


def test_a_worker_that_tells_nothing_is_expected_to_have_nothing() -> None:
    bus, _, client = fleet(2)
    ask(client, PROMPT)
    assert not any(member.marks for member in bus.core.context.members)
