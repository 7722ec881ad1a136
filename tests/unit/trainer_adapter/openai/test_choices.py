"""Numbers of a rollout as OpenAI's responses have them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from rolloutbus.trainer_adapter.client.core.results import Rollout
from rolloutbus.trainer_adapter.openai.answers import chat_logprobs, completion_logprobs, usage_of


@pytest.fixture
def rollout() -> Rollout:
    """Its first token was kept from an earlier attempt, of which nothing more is told."""
    return Rollout(
        rid="c/1",
        tokens=np.array([7, 8], np.int32),
        logprobs=np.array([-0.5, -math.inf], np.float32),
        behaviour_logprobs=np.array([-0.5, -math.inf], np.float32),
        version_runs=[(3, 2)],
        finish_reason="length",
        worker="w0",
        n_prompt_tokens=4,
        n_attempts=2,
        n_resumed=1,
        queue_ms=0.0,
        run_ms=0.0,
        arrays={
            "top_token_ids": np.array([[8, 9]], np.int32),
            "top_logprobs": np.array([[-0.25, -math.inf]], np.float32),
        },
    )


def no_bytes(_token: int, _text: str) -> None:
    """Of tokens that have none."""


def test_logprobs_are_numbers_that_json_has(rollout: Rollout) -> None:
    chat = chat_logprobs(rollout, str, no_bytes)
    json.dumps(chat, allow_nan=False)
    assert [each["logprob"] for each in chat["content"]] == [-0.5, -9999.0]
    columns = completion_logprobs(rollout, str, 2)
    assert columns["token_logprobs"] == [-0.5, -9999.0]
    assert columns["top_logprobs"] == [{}, {"8": -0.25, "9": -9999.0}]


def test_the_likeliest_stand_beside_their_own_token(rollout: Rollout) -> None:
    kept, sampled = chat_logprobs(rollout, str, no_bytes)["content"]
    assert kept["top_logprobs"] == []
    assert [each["token"] for each in sampled["top_logprobs"]] == ["8", "9"]


def test_a_prompt_is_counted_once_for_all_its_choices(rollout: Rollout) -> None:
    usage = usage_of([rollout] * 6, n_prompts=2)
    assert usage == {"prompt_tokens": 8, "completion_tokens": 12, "total_tokens": 20}


def test_what_was_cached_of_a_prompt_is_told_if_every_engine_told(rollout: Rollout) -> None:
    def having(n_cached: int) -> Rollout:
        arrays = {**rollout.arrays, "cached_tokens": np.array([n_cached], np.int32)}
        return replace(rollout, arrays=arrays)

    usage = usage_of([having(3), having(4), having(1), having(4)], n_prompts=2)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    # The attempt that ended had found four tokens of the prompt, and five of the answer.
    assert usage_of([having(9)])["prompt_tokens_details"] == {"cached_tokens": 4}
    assert "prompt_tokens_details" not in usage_of([having(3), rollout], n_prompts=2)
