"""What the commands to engines may ask for, and which field a refusal names."""

import msgspec
import numpy as np
import pytest

from rolloutbus.bus.wire.command_checks import check_command
from rolloutbus.bus.wire.messages.control import (
    Embed,
    FlushCache,
    LoadLora,
    Pause,
    Rerank,
    SaveWeights,
    Score,
    UnloadLora,
)

VOCAB_SIZE = 100
MAX_CONTEXT = 8


def ints(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def check(body: msgspec.Struct) -> tuple[str, str] | None:
    problem = check_command(body, vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT)
    if problem is None:
        return None
    assert (problem.code, problem.outcome) == ("bad_request", "not_started")
    return problem.field, problem.message


@pytest.mark.parametrize(
    "body",
    [
        Score(b"", [ints(1)] * 4096, [0, 99]),
        Score(ints(1, 2, 3), [b"", ints(1, 2, 3, 4, 5)], []),
        Embed([ints(*range(8))]),
        Rerank([("why", "because")]),
        LoadLora("judge", 3, path="adapters/judge"),
        LoadLora("judge", 3, bulk="tcp://127.0.0.1:7005"),
        UnloadLora("judge"),
        SaveWeights("results", "step-100.b", "sharded"),
        FlushCache(),
        Pause(),
    ],
)
def test_what_is_within_the_limits_passes(body: msgspec.Struct) -> None:
    assert check(body) is None


@pytest.mark.parametrize(
    ("body", "field", "limit"),
    [
        (Score(b"", [], [1]), "items", "1 to 4096"),
        (Score(b"", [ints(1)] * 4097, [1]), "items", "1 to 4096"),
        (Score(b"", [b""], [1]), "items", "1 to 8"),
        (Score(ints(1, 2, 3, 4), [ints(1, 2, 3, 4, 5)], [1]), "items", "1 to 8"),
        (Score(b"", [ints(100)], [1]), "items", "0 to 99"),
        (Score(ints(-1), [ints(1)], [1]), "query", "0 to 99"),
        (Score(b"", [b"\x01\x00\x00\x00\x01"], [1]), "items", "multiple of 4"),
        (Score(b"", [ints(1)], [100]), "label_token_ids", "0 to 99"),
        (Score(b"", [ints(1)], [1] * 1025), "label_token_ids", "at most 1024"),
        (Embed([]), "inputs", "1 to 4096"),
        (Embed([ints(*range(9))]), "inputs", "1 to 8"),
        (Rerank([]), "pairs", "1 to 4096"),
        (Rerank([("", "text")]), "pairs", "1 to 65536"),
        (LoadLora("", 1, path="x"), "name", "1 to 40"),
        (LoadLora("a@1", 1, path="x"), "name", "1 to 40"),
        (LoadLora("judge", 3), "bulk", "weight store"),
        (LoadLora("judge", bulk="tcp://127.0.0.1:7005"), "version", "weight store"),
        (UnloadLora("a b"), "name", "1 to 40"),
        (SaveWeights("results", "..", "sharded"), "name", "no dot first"),
        (SaveWeights("results", "a/b", "sharded"), "name", "1 to 64"),
        (SaveWeights("results", "", "sharded"), "name", "1 to 64"),
        (FlushCache([]), "tiers", "at least one"),
    ],
)
def test_what_breaks_a_limit_is_refused_with_field_and_limit(
    body: msgspec.Struct, field: str, limit: str
) -> None:
    found = check(body)
    assert found is not None
    assert found[0] == field
    assert limit in found[1]
