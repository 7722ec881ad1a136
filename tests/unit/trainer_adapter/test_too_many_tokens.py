"""A worker that sends more tokens than were asked for is found out, and fills no memory."""

import pytest

from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.generation import Repair, Repaired
from tests.unit.sizes import sizes
from tests.unit.trainer_adapter.bench import Bench, generated, ints, logprobs_of

ASKED = 8
"""max_new_tokens of the bench's requests."""
TOO_MANY = [*range(ASKED + 1)]


@pytest.mark.parametrize("kind", ["finished", "cancelled"])
@pytest.mark.parametrize("stream", [False, True])
def test_result_with_more_tokens_than_were_asked_for_is_an_error(
    bench: Bench, kind: str, *, stream: bool
) -> None:
    rid = bench.generate(stream=stream)
    bench.accept(rid, (1, 1))
    bench.finish(rid, (1, 1), generated(*TOO_MANY), kind=kind)
    error = bench.outcomes[rid]
    assert isinstance(error, RemoteProtocolError)
    assert "9 tokens came for max_new_tokens 8" in str(error)
    assert bench.deltas == []
    assert bench.core.counters.malformed_in == 1


def test_result_of_exactly_as_many_is_one(bench: Bench) -> None:
    rid = bench.generate()
    bench.finish(rid, (1, 1), generated(*TOO_MANY[:-1]))
    assert len(bench.rollout(rid).tokens) == ASKED


def test_rows_beyond_are_neither_held_nor_delivered(bench: Bench) -> None:
    rid = bench.generate(stream=True)
    bench.accept(rid, (1, 1))
    for start in range(0, 4000, 2):
        bench.row(rid, (1, 1), start, 5, 6)
    assert [token for delta in bench.deltas for token in delta.tokens] == [5, 6] * (ASKED // 2)
    bench.deltas.clear()
    assert max(sizes(bench.core).values()) <= 64
    bench.finish(rid, (1, 1), generated(*[5, 6] * (ASKED // 2)))
    assert bench.rollout(rid).tokens.tolist() == [5, 6] * (ASKED // 2)


def test_repair_that_brings_more_is_not_held(bench: Bench) -> None:
    rid = bench.generate(stream=True)
    bench.accept(rid, (1, 1))
    bench.row(rid, (1, 1), 2, 7)
    (repair,) = bench.take("repair")
    bench.sent.append(repair)
    assert bench.bodies("repair", Repair) == [Repair(rid, (1, 1), 0)]
    lie = Repaired(0, ints(*TOO_MANY), logprobs_of(*TOO_MANY), [(0, len(TOO_MANY))])
    bench.answer_fleet(repair.rid, "finished", lie)
    assert bench.deltas == []
    bench.finish(rid, (1, 1), generated(5, 6, 7))
    assert bench.rollout(rid).tokens.tolist() == [5, 6, 7]
