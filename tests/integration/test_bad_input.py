"""Whatever is wrong with a request, its caller is told which field and what would be right."""

import math
from typing import Any

import numpy as np
import pytest

from rolloutbus import RolloutClient, SamplingParams
from rolloutbus.bus.wire.messages.generation import CloseSession
from rolloutbus.bus.wire.messages.weights import PublishVersion
from rolloutbus.errors import BusError, Refused, RequestError
from rolloutbus.launcher.settings import UpOptions
from tests.integration.live_fleet import (
    DEADLINE_S,
    assert_fake_rollout,
    fake_sampling,
    status_when,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

MAX_CONTEXT, VOCAB_SIZE = 1024, 32_000
FLEET: UpOptions = {
    "workers": 1,
    "engine": "fake",
    "engine_options": {"max_context": MAX_CONTEXT},
    "transport": "tcp",
    "store": False,
}
PROMPT = [1, 2, 3]


async def assert_serves(client: RolloutClient) -> None:
    rollout = await client.generate(PROMPT, fake_sampling(8), deadline_s=DEADLINE_S)
    assert_fake_rollout(PROMPT, rollout, 8)


def assert_explains(error: RequestError, field: str, says: str) -> None:
    assert isinstance(error, Refused)
    assert (error.code, error.field, error.outcome) == ("bad_request", field, "not_started")
    assert says in str(error)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "a token"),
        ([[1, 2], [3, 4]], "one list of token ids"),
        ([1.5, 2.5], "integers"),
        (["a", "b"], "integers"),
        ([1, -1], "negative"),
        ([1, 2**31], "int32"),
        ([1, VOCAB_SIZE, 2], f"token {VOCAB_SIZE} at index 1 is no token id from 0 to 31999"),
        ([1] * MAX_CONTEXT, f"context of {MAX_CONTEXT} tokens"),
        (np.ones(2**20 + 1, np.int32), "at most 1048576 tokens"),
    ],
    ids=[
        "empty",
        "two dimensions",
        "floats",
        "texts",
        "negative",
        "beyond int32",
        "beyond the vocabulary",
        "beyond the context",
        "beyond 4 MiB",
    ],
)
async def test_a_bad_prompt_is_refused(client: RolloutClient, prompt: Any, says: str) -> None:  # noqa: ANN401
    with pytest.raises(Refused) as caught:
        await client.generate(prompt, fake_sampling(8), deadline_s=DEADLINE_S)
    assert_explains(caught.value, "prompt", says)
    await assert_serves(client)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", math.nan, "0 (greedy), or from 1e-06 to 100"),
        ("temperature", -0.1, "0 (greedy), or from 1e-06 to 100"),
        ("temperature", math.inf, "0 (greedy), or from 1e-06 to 100"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.1, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("top_k", -2, "at least 0"),
        ("min_p", 1.5, "from 0 to 1"),
        ("repetition_penalty", 0.0, "from 0.01 to 10"),
        ("frequency_penalty", 2.5, "from -2 to 2"),
        ("presence_penalty", math.nan, "from -2 to 2"),
        ("max_new_tokens", 0, "at least 1"),
        ("max_new_tokens", MAX_CONTEXT, f"context of {MAX_CONTEXT} tokens"),
        ("min_new_tokens", 129, "from 0 to max_new_tokens, which is 128"),
        ("sampling_seed", 2**63, "int64"),
        ("stop_token_ids", [VOCAB_SIZE], "from 0 to 31999"),
        ("stop_token_ids", [1] * 129, "length <= 128"),
        ("top_p", "high", "Expected `float`"),
    ],
)
async def test_a_bad_sampling_value_is_refused_with_its_limit(
    client: RolloutClient,
    field: str,
    value: Any,  # noqa: ANN401
    says: str,
) -> None:
    sampling = SamplingParams(**{field: value})
    with pytest.raises(Refused) as caught:
        await client.generate(PROMPT, sampling, deadline_s=DEADLINE_S)
    assert_explains(caught.value, f"sampling.{field}", says)
    await assert_serves(client)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("versions", "newest", "any, latest, min:V, exact:V, min-tag:T or max-staleness:K"),
        ("versions", "min:-1", "any, latest"),
        ("versions", "min:", "any, latest"),
        ("versions", f"exact:{2**64}", "wants a number up to"),
        ("priority", 101, "[-100, 100]"),
        ("policy", "two words", "printable ASCII"),
        ("policy", "", "1 to 64"),
        ("session", "x" * 65, "1 to 64"),
        ("group", "a@b", "without spaces and @"),
    ],
)
async def test_a_bad_option_is_refused_before_it_is_sent(
    client: RolloutClient,
    option: Any,  # noqa: ANN401
    value: Any,  # noqa: ANN401
    says: str,
) -> None:
    with pytest.raises(Refused) as caught:
        await client.generate(PROMPT, fake_sampling(8), **{option: value})
    field = option if says.startswith("any, latest") else f"place.{option}"
    assert_explains(caught.value, field, says)
    await assert_serves(client)


async def test_a_request_for_a_policy_that_nobody_serves_is_refused_at_its_deadline(
    client: RolloutClient,
) -> None:
    # A young router knows of no policy: it would let the request expire.
    await status_when(client, lambda status: not status.recovering)
    with pytest.raises(Refused, match="'other' is here or expected; there are 'default'") as caught:
        await client.generate(PROMPT, fake_sampling(8), policy="other", deadline_s=0.5)
    assert (caught.value.code, caught.value.field) == ("unknown_policy", "place.policy")
    await assert_serves(client)


@pytest.mark.parametrize(
    ("deadline_s", "says"),
    [
        (0.0, "seconds above 0"),
        (-1.0, "seconds above 0"),
        (math.nan, "a number"),
        (math.inf, "seconds above 0"),
    ],
)
async def test_a_deadline_that_is_none_is_refused(
    client: RolloutClient, deadline_s: float, says: str
) -> None:
    with pytest.raises(Refused) as caught:
        await client.generate(PROMPT, fake_sampling(8), deadline_s=deadline_s)
    assert_explains(caught.value, "deadline_s", says)
    await assert_serves(client)


async def test_unknown_targets_are_named(client: RolloutClient) -> None:
    with pytest.raises(Refused, match="nobody") as worker:
        await client.pause(target="nobody")
    assert (worker.value.code, worker.value.field) == ("unknown_worker", "route")
    with pytest.raises(Refused, match="never-opened") as session:
        await client.ref().ask(CloseSession("never-opened"), deadline_s=5.0)
    assert (session.value.code, session.value.field) == ("unknown_session", "session")
    with pytest.raises(Refused, match="no weight store is connected") as store:
        await client.ref().ask(PublishVersion("default", 1), deadline_s=0.5)
    assert store.value.code == "no_store"
    await assert_serves(client)


async def test_a_bad_control_value_is_refused(client: RolloutClient) -> None:
    with pytest.raises(Refused, match="sideways") as caught:
        await client.pause("sideways")  # pyright: ignore[reportArgumentType]
    assert (caught.value.code, caught.value.field) == ("bad_request", "mode")
    await assert_serves(client)


async def test_every_error_of_a_caller_is_in_one_tree(client: RolloutClient) -> None:
    with pytest.raises(BusError):
        await client.generate([], fake_sampling(8))
    with pytest.raises(BusError):
        await client.generate_batch([PROMPT], fake_sampling(8), n=0)
    await assert_serves(client)
