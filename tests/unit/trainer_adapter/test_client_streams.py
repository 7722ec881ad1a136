"""Streams as a client reads them: in order, without gaps, equal to the result."""

from rolloutbus.bus.wire.messages.generation import Repair, Repaired
from rolloutbus.trainer_adapter.client.core.results import Delta
from tests.unit.trainer_adapter.bench import Bench, generated, ints, logprobs_of


def read(deltas: list[Delta]) -> list[int]:
    """What a reader holds who believes `start`."""
    held: list[int] = []
    for delta in deltas:
        assert delta.start <= len(held)
        held[delta.start :] = delta.tokens.tolist()
    return held


def test_a_stream_equals_the_result_and_says_at_the_end_why_it_ended(bench: Bench) -> None:
    rid = bench.generate(stream=True)
    bench.row(rid, (1, 1), 0, 5)
    bench.row(rid, (1, 1), 1, 6, 7, version=1)
    bench.row(rid, (1, 1), 3, 8, version=1, is_last=True)
    assert [delta.finish_reason for delta in bench.deltas] == [None, None]
    bench.finish(rid, (1, 1), generated(5, 6, 7, 8, versions=[(0, 1), (1, 3)]))
    assert read(bench.deltas) == [5, 6, 7, 8]
    assert [delta.version for delta in bench.deltas] == [0, 1, 1]
    assert [delta.finish_reason for delta in bench.deltas] == [None, None, "length"]


def test_an_ending_that_overtakes_the_stream_completes_it(bench: Bench) -> None:
    rid = bench.generate(stream=True)
    bench.row(rid, (1, 1), 0, 5)
    bench.finish(rid, (1, 1), generated(5, 6, 7, versions=[(0, 2), (1, 1)]))
    bench.row(rid, (1, 1), 1, 6)  # late: nobody reads it any more
    assert read(bench.deltas) == [5, 6, 7]
    assert [delta.finish_reason for delta in bench.deltas] == [None, None, "length"]
    assert [delta.version for delta in bench.deltas] == [0, 0, 1]


def test_a_result_whose_tokens_were_all_streamed_still_ends_the_stream(bench: Bench) -> None:
    rid = bench.generate(stream=True)
    bench.row(rid, (1, 1), 0, 5, 6)
    bench.finish(rid, (1, 1), generated(5, 6))
    assert bench.deltas[-1].finish_reason == "length"
    assert bench.deltas[-1].tokens.size == 0


def test_a_gap_is_repaired_once_and_the_stream_goes_on_in_order(bench: Bench) -> None:
    rid = bench.generate(stream=True)
    bench.row(rid, (1, 1), 0, 5)
    bench.row(rid, (1, 1), 2, 7)
    bench.row(rid, (1, 1), 3, 8)
    (entry,) = bench.take("repair")
    assert entry.route == "worker:w0"
    bench.sent.append(entry)
    assert bench.bodies("repair", Repair) == [Repair(rid, (1, 1), 1)]
    assert read(bench.deltas) == [5]
    bench.answer_fleet(entry.rid, "finished", Repaired(1, ints(6, 7), logprobs_of(6, 7), [(0, 2)]))
    assert read(bench.deltas) == [5, 6, 7, 8]
    assert (bench.core.counters.gaps, bench.core.counters.repairs) == (1, 1)


def test_an_idle_heartbeat_reveals_a_lost_tail(bench: Bench) -> None:
    rid = bench.generate(stream=True)
    bench.row(rid, (1, 1), 0, 5)
    bench.idle(rid, (1, 1), 1)
    assert bench.take("repair") == []
    bench.idle(rid, (1, 1), 3)
    (entry,) = bench.take("repair")
    bench.answer_fleet(entry.rid, "finished", Repaired(1, ints(6, 7), logprobs_of(6, 7), [(0, 2)]))
    assert read(bench.deltas) == [5, 6, 7]


def test_after_three_failed_repairs_the_result_fills_the_gap(bench: Bench) -> None:
    rid = bench.generate(stream=True)
    bench.row(rid, (1, 1), 0, 5)
    for _ in range(6):
        bench.idle(rid, (1, 1), 3)
        bench.pass_time(7.0)  # no answer
    assert len({entry.rid for entry in bench.take("repair")}) == 3
    bench.finish(rid, (1, 1), generated(5, 6, 7))
    assert read(bench.deltas) == [5, 6, 7]


def test_a_stream_is_repaired_as_often_as_a_repair_helps(bench: Bench) -> None:
    rid = bench.generate(stream=True)
    bench.row(rid, (1, 1), 0, 5)
    for n_held in range(1, 6):
        bench.idle(rid, (1, 1), n_held + 2)  # one more is lost while each repair is under way
        (entry,) = bench.take("repair")
        token = 5 + n_held
        body = Repaired(n_held, ints(token), logprobs_of(token), [(0, 1)])
        bench.answer_fleet(entry.rid, "finished", body)
    assert read(bench.deltas) == [5, 6, 7, 8, 9, 10]


def test_repeated_and_overlapping_rows_bring_each_token_once(bench: Bench) -> None:
    rid = bench.generate(stream=True)
    bench.row(rid, (1, 1), 0, 5, 6)
    bench.row(rid, (1, 1), 0, 5, 6)
    bench.row(rid, (1, 1), 1, 6, 7)
    assert [delta.tokens.tolist() for delta in bench.deltas] == [[5, 6], [7]]
    assert bench.core.counters.duplicates == 1


def test_a_resumed_stream_goes_on_where_it_stopped(bench: Bench) -> None:
    rid = bench.generate(stream=True)
    bench.row(rid, (1, 1), 0, 5, 6)
    bench.lose(rid, (1, 1))
    bench.row(rid, (1, 2), 2, 7, worker="w1")
    bench.finish(rid, (1, 2), generated(5, 6, 7, 8, n_resumed=2), worker="w1")
    assert [delta.start for delta in bench.deltas] == [0, 2, 3]
    assert read(bench.deltas) == [5, 6, 7, 8]


def test_a_retried_stream_says_that_it_starts_again(bench: Bench) -> None:
    rid = bench.generate(stream=True, on_loss="retry")
    bench.row(rid, (1, 1), 0, 5, 6)
    bench.lose(rid, (1, 1))
    bench.row(rid, (1, 2), 0, 7, worker="w1")
    bench.finish(rid, (1, 2), generated(7, 8), worker="w1")
    assert [delta.start for delta in bench.deltas] == [0, 0, 1]
    assert read(bench.deltas) == [7, 8]


def test_the_result_has_the_last_word_over_the_stream(bench: Bench) -> None:
    rid = bench.generate(stream=True)
    bench.row(rid, (1, 1), 0, 5, 99)
    bench.finish(rid, (1, 1), generated(5, 6, 7))
    assert read(bench.deltas) == [5, 6, 7]
    assert bench.core.counters.stream_mismatches == 1


def test_an_unstreamed_request_delivers_nothing_but_keeps_its_prefix(bench: Bench) -> None:
    rid = bench.generate()
    bench.row(rid, (1, 1), 0, 5)
    bench.finish(rid, (1, 1), generated(5, 6))
    assert bench.deltas == []
    assert bench.rollout(rid).tokens.tolist() == [5, 6]
