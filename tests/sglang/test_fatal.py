"""What would end SGLang's scheduler never reaches it: the caller is told, the engine lives on."""

import math
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from msgspec import Raw

from rolloutbus import Fleet, RolloutClient, SamplingParams
from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.messages.endings import Problem
from tests.integration.raw_client import RawClient
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.models import VOCAB_SIZE
from tests.sglang.processes import scheduler_pids

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5, 6, 7]
COLUMN = np.array(PROMPT, "<i4").tobytes()
GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def raw(fleet: Fleet) -> AsyncIterator[RawClient]:
    async with RawClient(fleet.address) as connected:
        yield connected


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def the_engine_lives_on(fleet: Fleet, client: RolloutClient) -> AsyncIterator[None]:
    """After each test: the same scheduler as before it, and it works."""
    before = scheduler_pids(fleet)
    assert before
    yield
    rollout = await client.generate(PROMPT, GREEDY, deadline_s=DEADLINE_S)
    assert len(rollout.tokens) == GREEDY.max_new_tokens
    assert scheduler_pids(fleet) == before


def said(**sampling: object) -> dict[str, Any]:
    """The body of a `generate`, whatever its sampling parameters."""
    return {"prompt": COLUMN, "sampling": {"max_new_tokens": 4, **sampling}}


BREAKING: list[tuple[dict[str, Any], str]] = [
    (said(max_new_tokens=5.5), "max_new_tokens"),
    (said(max_new_tokens="5"), "max_new_tokens"),
    (said(top_k=2.5), "top_k"),
    (said(ignore_eos=1), "ignore_eos"),
    (said(sampling_seed="7"), "sampling_seed"),
    (said(sampling_seed=2**64 - 1), "sampling_seed"),
    (said(temperature=math.inf), "temperature"),
    (said(stop_token_ids=[[1]]), "stop_token_ids"),
    (said(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids"),
    (said(logit_bias={"five": 1.0}), "logit_bias"),
    (said(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
    (said(logit_bias={5: math.nan}), "logit_bias"),
    (said(n=2), "n"),
    (said(custom_params={"a": 1}), "custom_params"),
    ({**said(), "prompt": np.array([5, VOCAB_SIZE], "<i4").tobytes()}, "prompt"),
    ({**said(), "prompt": np.array([5, -1], "<i4").tobytes()}, "prompt"),
    ({**said(), "prompt": b""}, "prompt"),
    ({**said(), "grammar": {"kind": "json_schema", "text": {"type": "object"}}}, "grammar"),
    ({**said(), "grammar": {"kind": "regex", "text": "(("}}, "grammar"),
    ({**said(), "processors": [{"name": "nobodys", "params": {}}]}, "processors"),
    ({**said(), "processors": [{"name": "x", "params": {"a": [[1]]}}]}, "processors"),
    ({**said(), "processors": "gASV..."}, "processors"),
    ({**said(), "media": [{"kind": "image", "data": "file:///etc/passwd"}]}, "media"),
    ({**said(), "media": [{"kind": "image", "data": b"no image"}]}, "media"),
    ({**said(), "want": {"logprobs_of": [VOCAB_SIZE]}}, "logprobs_of"),
    ({**said(), "want": {"prompt_logprobs": True, "prompt_logprobs_start": 9}}, "start"),
    ({**said(), "want": {"hidden_states": "all"}}, "hidden_states"),
    ({**said(), "lora": "nobodys"}, "lora"),
]


@pytest.mark.parametrize(("body", "field"), BREAKING, ids=[str(body)[:90] for body, _ in BREAKING])
async def test_a_request_that_would_break_a_scheduler_ends_with_the_name_of_its_field(
    raw: RawClient, body: dict[str, Any], field: str
) -> None:
    rid = raw.next_rid()
    raw.generate(rid, Raw(msgspec.msgpack.encode(body)))

    problem = problem_in(await raw.ending(rid))

    assert problem.code in {"bad_request", "unsupported", "not_found"}
    assert field in f"{problem.field} {problem.message}"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("pause", {"mode": "gently"}),
        ("pause", {"mode": None}),
        ("sleep", {"tags": ["everything"]}),
        ("wake_up", {"tags": ["kv_cash"]}),
        ("flush_cache", {"tiers": ["floppy"]}),
    ],
)
async def test_a_command_with_a_word_that_does_not_exist_is_refused(
    raw: RawClient, kind: str, body: dict[str, object]
) -> None:
    rid = raw.next_rid()
    raw.say(kind, rid, Raw(msgspec.msgpack.encode(body)), route="w0")

    assert problem_in(await raw.ending(rid)).code == "bad_request"


def problem_in(entry: Any) -> Problem:  # noqa: ANN401 - whatever kind of ending
    found = unpack(entry)
    assert isinstance(found, Problem), entry
    return found
