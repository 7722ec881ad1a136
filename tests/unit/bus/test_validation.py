"""What callers may ask for, and which field a refusal names."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from rolloutbus.bus.wire.entry import Placement
from rolloutbus.bus.wire.limits import MAX_STOP_TOKEN_IDS, MAX_TOKENS_BYTES
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Generate, Prefix, SamplingParams
from rolloutbus.bus.wire.validation import (
    MAX_COST,
    MAX_NAME_BYTES,
    MAX_RID_BYTES,
    check_generate,
    check_name,
    check_placement,
    check_rid,
    check_sampling,
)

VOCAB_SIZE = 100
MAX_CONTEXT = 64
UINT64_MAX = 2**64 - 1


def _ints(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def _floats(n: int) -> bytes:
    return np.full(n, -1.5, "<f4").tobytes()


def _assert_refused(problem: Problem | None, field: str, limit: str = "") -> None:
    assert problem is not None
    assert (problem.code, problem.outcome, problem.field) == ("bad_request", "not_started", field)
    assert limit in problem.message


GOOD = Generate(
    prompt=_ints(1, 2, 99),
    sampling=SamplingParams(max_new_tokens=8),
    prefix=Prefix(_ints(5, 6, 7), _floats(3), [(1, 2), (UINT64_MAX, 1)], _floats(3)),
)
GOOD_PREFIX = Prefix(_ints(5, 6, 7), _floats(3), [(1, 3)])


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 100.0, "top_p": 1e-6, "min_p": 1.0, "top_k": 10**9},
        {"max_new_tokens": 3, "min_new_tokens": 3},
        {"sampling_seed": 2**63 - 1},
        {"sampling_seed": -(2**63)},
        {"repetition_penalty": 0.01, "frequency_penalty": -2.0, "presence_penalty": 2.0},
        {"stop_token_ids": [0, VOCAB_SIZE - 1]},
        {"stop_token_ids": [1] * MAX_STOP_TOKEN_IDS},
    ],
)
def test_sampling_within_its_limits_passes(values: dict[str, Any]) -> None:
    assert check_sampling(SamplingParams(**values), VOCAB_SIZE) is None


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        *[
            (name, value, "")
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "repetition_penalty",
                "frequency_penalty",
                "presence_penalty",
            )
            for value in (math.nan, math.inf, -math.inf)
        ],
        ("temperature", -0.1, "0 (greedy), or from 1e-06 to 100"),
        ("temperature", 1e-7, "0 (greedy), or from 1e-06 to 100"),
        ("temperature", 100.5, "100"),
        ("top_p", 0.0, "above 0"),
        ("top_p", -0.5, "above 0"),
        ("top_p", 1.01, "at most 1"),
        ("top_k", -1, "at least 0"),
        ("min_p", -0.01, "from 0 to 1"),
        ("min_p", 1.5, "from 0 to 1"),
        ("repetition_penalty", 0.0, "from 0.01 to 10"),
        ("repetition_penalty", 1e-30, "from 0.01 to 10"),
        ("repetition_penalty", -1.0, "from 0.01 to 10"),
        ("repetition_penalty", 10.5, "from 0.01 to 10"),
        ("frequency_penalty", 2.1, "from -2 to 2"),
        ("presence_penalty", -2.1, "from -2 to 2"),
        ("max_new_tokens", 0, "at least 1"),
        ("max_new_tokens", -5, "at least 1"),
        ("min_new_tokens", -1, "from 0"),
        ("min_new_tokens", 129, "which is 128"),
        ("sampling_seed", 2**63, "int64"),
        ("sampling_seed", -(2**63) - 1, "int64"),
        ("stop_token_ids", [VOCAB_SIZE], "from 0 to 99"),
        ("stop_token_ids", [1, -1], "from 0 to 99"),
        ("stop_token_ids", [1] * (MAX_STOP_TOKEN_IDS + 1), "at most 128"),
    ],
)
def test_sampling_beyond_a_limit_names_its_field(name: str, value: object, limit: str) -> None:
    sampling = msgspec.structs.replace(SamplingParams(), **{name: value})
    _assert_refused(check_sampling(sampling, VOCAB_SIZE), f"sampling.{name}", limit)


@pytest.mark.parametrize(
    "body",
    [
        GOOD,
        msgspec.structs.replace(GOOD, prefix=None),
        Generate(_ints(0), SamplingParams(max_new_tokens=MAX_CONTEXT - 1)),
        Generate(_ints(1), SamplingParams(max_new_tokens=3), prefix=GOOD_PREFIX),
        Generate(_ints(1), SamplingParams(), prefix=Prefix(b"", b"", [])),
    ],
)
def test_good_generate_passes(body: Generate) -> None:
    assert check_generate(body, vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT * 4) is None


@pytest.mark.parametrize(
    ("changes", "field", "limit"),
    [
        ({"prompt": b""}, "prompt", "at least one token"),
        ({"prompt": b"\0\0\0"}, "prompt", "multiple of 4"),
        ({"prompt": _ints(1, VOCAB_SIZE)}, "prompt", "token 100 at index 1"),
        ({"prompt": _ints(-1)}, "prompt", "from 0 to 99"),
        ({"prompt": bytes(MAX_TOKENS_BYTES + 4)}, "prompt", "4194304"),
        ({"prompt": _ints(*[1] * MAX_CONTEXT)}, "prompt", "64 tokens"),
        ({"prompt": _ints(*[1] * 57)}, "sampling.max_new_tokens", "64 tokens"),
        ({"sampling": SamplingParams(top_p=2.0)}, "sampling.top_p", "at most 1"),
        ({"sampling": SamplingParams(max_new_tokens=2)}, "prefix.tokens", "max_new_tokens is 2"),
    ],
)
def test_bad_generate_names_its_field(changes: dict[str, Any], field: str, limit: str) -> None:
    body = msgspec.structs.replace(GOOD, **changes)
    problem = check_generate(body, vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT)
    _assert_refused(problem, field, limit)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens": b"\0" * 5}, "prefix.tokens"),
        ({"tokens": _ints(1, 2, VOCAB_SIZE)}, "prefix.tokens"),
        ({"logprobs": _floats(2)}, "prefix.logprobs"),
        ({"behaviour_logprobs": _floats(4)}, "prefix.behaviour_logprobs"),
        ({"versions": [(1, 2)]}, "prefix.versions"),
        ({"versions": []}, "prefix.versions"),
        ({"versions": [(1, 4), (2, -1)]}, "prefix.versions"),
        ({"versions": [(-1, 3)]}, "prefix.versions"),
        ({"versions": [(1, 3), (2, 0)]}, "prefix.versions"),
    ],
)
def test_bad_prefix_names_its_column(changes: dict[str, Any], field: str) -> None:
    prefix = msgspec.structs.replace(GOOD_PREFIX, **changes)
    body = msgspec.structs.replace(GOOD, prefix=prefix)
    _assert_refused(check_generate(body, vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT), field)


def test_a_prefix_that_was_truncated_comes_with_the_logprobs_over_what_was_left() -> None:
    cut = SamplingParams(max_new_tokens=8, top_p=0.9)
    bare = msgspec.structs.replace(GOOD, sampling=cut, prefix=GOOD_PREFIX)
    measured = msgspec.structs.replace(GOOD, sampling=cut)
    _assert_refused(
        check_generate(bare, vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT),
        "prefix.behaviour_logprobs",
        "missing",
    )
    assert check_generate(measured, vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT) is None


@pytest.mark.parametrize("name", ["w", "w0", "trainer-1", "a/b:c.d", "~!?", "x" * MAX_NAME_BYTES])
def test_plain_name_passes(name: str) -> None:
    assert check_name(name) is None


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "a@b", "é", "a\n", "a\0", "\x7f", "x" * (MAX_NAME_BYTES + 1)]
)
def test_bad_name_is_refused_with_the_limit(name: str) -> None:
    _assert_refused(check_name(name), "name", "1 to 64 printable ASCII")


@pytest.mark.parametrize(
    "rid", ["a/0", "a/b/12", "c/18446744073709551615", f"c/{2**192 - 1}", "x" * 64 + "/1"]
)
def test_rid_of_a_client_passes(rid: str) -> None:
    assert check_rid(rid) is None
    assert check_rid(rid, client=rid.rpartition("/")[0]) is None


@pytest.mark.parametrize(
    "rid",
    [
        *["", "/1", "a", "a/", "a/01", "a/-1", "a/x", "a b/1", "a/1\n", "a/1@w0"],
        "x" * 65 + "/1",
        "a/" + "1" * MAX_RID_BYTES,
    ],
)
def test_bad_rid_is_refused(rid: str) -> None:
    _assert_refused(check_rid(rid), "rid")


def test_rid_of_another_client_is_refused() -> None:
    _assert_refused(check_rid("alice/1", client="bob"), "rid", "'bob'")
    _assert_refused(check_rid("bob/x/1", client="bob"), "rid")


@pytest.mark.parametrize(
    "place",
    [
        Placement("default"),
        Placement("p", "max-staleness:2", "s", "g", MAX_COST, -100, resend=True),
    ],
)
def test_good_placement_passes(place: Placement) -> None:
    assert check_placement(place) is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"policy": ""}, "place.policy"),
        ({"versions": "newest"}, "place.versions"),
        ({"session": "a b"}, "place.session"),
        ({"group": "x" * 65}, "place.group"),
        ({"cost": -1}, "place.cost"),
        ({"cost": MAX_COST + 1}, "place.cost"),
        ({"priority": 101}, "place.priority"),
        ({"priority": -101}, "place.priority"),
    ],
)
def test_bad_placement_names_its_field(changes: dict[str, Any], field: str) -> None:
    place = msgspec.structs.replace(Placement("default"), **changes)
    _assert_refused(check_placement(place), field)
