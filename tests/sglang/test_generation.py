"""What the real SGLang samples, through the whole bus."""

import asyncio

import numpy as np
import pytest

from rolloutbus import Rollout, RolloutClient, SamplingParams
from rolloutbus.errors import Refused
from tests.integration.live_fleet import Streamed
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.models import ENDLESS, EOS, MAX_CONTEXT, VOCAB_SIZE
from tests.sglang.reference import SameWeights

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOLERANCE = 1e-4
PROMPTS = [[3 + i, 10, 20 + i, 7, 100 + i] for i in range(8)]
GREEDY = SamplingParams(max_new_tokens=32, temperature=0.0, ignore_eos=True)
MIXED = [
    GREEDY,
    SamplingParams(max_new_tokens=24, temperature=0.7, ignore_eos=True),
    SamplingParams(max_new_tokens=40, temperature=1.3, top_k=20, ignore_eos=True),
    SamplingParams(max_new_tokens=16, temperature=1.0, top_p=0.8, ignore_eos=True),
    SamplingParams(max_new_tokens=30, temperature=0.9, min_p=0.02, ignore_eos=True),
    SamplingParams(max_new_tokens=20, temperature=1.0, top_k=5, top_p=0.9, ignore_eos=True),
]


def assert_true(
    reference: SameWeights, prompt: list[int], rollout: Rollout, temperature: float
) -> None:
    truth = reference.fresh(prompt, rollout, temperature or 1.0)
    assert np.abs(truth - rollout.logprobs).max() < TOLERANCE


@pytest.mark.shows(
    "prompt_token_ids",
    "InferenceEngineOutput",
    "response_ids",
    "response_logprobs",
    "max_new_tokens",
    "max_generate_length",
    "logprobs: 0",
)
async def test_greedy_tokens_and_logprobs_are_those_of_a_plain_forward_pass(
    client: RolloutClient, reference: SameWeights
) -> None:
    rollouts = await client.generate_batch(PROMPTS, GREEDY, deadline_s=DEADLINE_S)

    for prompt, [rollout] in zip(PROMPTS, rollouts, strict=True):
        assert rollout.tokens.tolist() == reference.likeliest(prompt, rollout)
        assert_true(reference, prompt, rollout, 0.0)


@pytest.mark.shows("sampling_params", "temperature")
async def test_neighbours_with_other_sampling_change_nothing(
    client: RolloutClient, reference: SameWeights
) -> None:
    alone = await client.generate(PROMPTS[0], GREEDY, deadline_s=DEADLINE_S)
    asked = [(prompt, sampling) for sampling in MIXED for prompt in PROMPTS[:4]]

    rollouts = await asyncio.gather(
        *(client.generate(prompt, sampling, deadline_s=DEADLINE_S) for prompt, sampling in asked)
    )

    assert rollouts[0].tokens.tolist() == alone.tokens.tolist()
    for (prompt, sampling), rollout in zip(asked, rollouts, strict=True):
        assert len(rollout.tokens) == sampling.max_new_tokens
        assert rollout.finish_reason == "length"
        assert_true(reference, prompt, rollout, sampling.temperature)


@pytest.mark.shows("generate", "n_per_prompt", "group_outputs_by_prompt", "random_seed")
async def test_samples_of_one_prompt_differ(client: RolloutClient) -> None:
    sampling = SamplingParams(max_new_tokens=24, temperature=1.0, ignore_eos=True)

    samples = await client.generate_batch(PROMPTS[:2], sampling, n=4, deadline_s=DEADLINE_S)

    assert [len(group) for group in samples] == [4, 4]
    assert len({tuple(each.tokens.tolist()) for group in samples for each in group}) == 8


@pytest.mark.shows("generate_stream", "StreamingChunk.logprobs", "StreamingChunk.finished")
async def test_streams_hold_each_token_of_their_results_once(client: RolloutClient) -> None:
    streams = [Streamed(client, prompt, sampling) for prompt in PROMPTS for sampling in MIXED[:3]]

    for streamed in streams:
        rollout = await streamed.rollout()
        assert streamed.is_contiguous
        assert streamed.tokens == rollout.tokens.tolist()
        assert streamed.logprobs == rollout.logprobs.tolist()


@pytest.mark.shows("StreamingChunk.delta_tokens", "supports_streaming")
async def test_a_stream_tells_tokens_as_they_are_made(client: RolloutClient) -> None:
    streamed = Streamed(client, PROMPTS[0], SamplingParams(max_new_tokens=ENDLESS, ignore_eos=True))
    # With the result alone it would be one. A busy reader finds several tokens in one.
    await streamed.seen(lambda: len(streamed.deltas) > 2)
    await streamed.cut()


@pytest.mark.shows("ignore_eos", "stop_token_ids")
async def test_stop_tokens_end_a_request_also_without_end_of_sequence(
    client: RolloutClient, reference: SameWeights
) -> None:
    sampling = SamplingParams(max_new_tokens=200, temperature=1.0, ignore_eos=True)
    free = await client.generate(PROMPTS[1], sampling, deadline_s=DEADLINE_S)
    stops = sorted({int(token) for token in free.tokens[:40]})
    stopping = SamplingParams(
        max_new_tokens=2000, temperature=1.0, ignore_eos=True, stop_token_ids=stops
    )

    rollouts = [Streamed(client, prompt, stopping) for prompt in PROMPTS]

    for prompt, streamed in zip(PROMPTS, rollouts, strict=True):
        rollout = await streamed.rollout()
        *others, last = rollout.tokens.tolist()
        assert rollout.finish_reason == "stop"
        assert last in stops
        assert not {*others} & {*stops}
        assert streamed.tokens == rollout.tokens.tolist()
        assert_true(reference, prompt, rollout, 1.0)


@pytest.mark.shows("stop_reasons")
async def test_end_of_sequence_ends_a_request_unless_ignored(client: RolloutClient) -> None:
    # One token in about 512 ends it.
    hot = SamplingParams(max_new_tokens=ENDLESS, temperature=5.0)
    rollout = await client.generate(PROMPTS[2], hot, deadline_s=DEADLINE_S)
    assert rollout.finish_reason == "stop"
    assert rollout.tokens.tolist().index(EOS) == len(rollout.tokens) - 1


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ([5, VOCAB_SIZE], SamplingParams(max_new_tokens=4), "prompt"),
        ([5, -1], SamplingParams(max_new_tokens=4), "prompt"),
        ([], SamplingParams(max_new_tokens=4), "prompt"),
        ([5] * MAX_CONTEXT, SamplingParams(max_new_tokens=1), "prompt"),
        ([5, 6], SamplingParams(max_new_tokens=MAX_CONTEXT - 1), "sampling.max_new_tokens"),
        (
            [5, 6],
            SamplingParams(max_new_tokens=4, stop_token_ids=[VOCAB_SIZE]),
            "sampling.stop_token",
        ),
        (
            [5, 6],
            SamplingParams(max_new_tokens=4, temperature=float("nan")),
            "sampling.temperature",
        ),
        ([5, 6], SamplingParams(max_new_tokens=4, top_p=0.0), "sampling.top_p"),
    ],
    ids=[
        "beyond the vocabulary",
        "negative",
        "empty",
        "long prompt",
        "long output",
        "stop beyond the vocabulary",
        "not a number",
        "empty nucleus",
    ],
)
async def test_what_cannot_be_sampled_is_refused_and_names_its_field(
    client: RolloutClient, prompt: list[int], sampling: SamplingParams, field: str
) -> None:
    with pytest.raises(Refused) as caught:
        await client.generate(prompt, sampling, deadline_s=DEADLINE_S)
    assert caught.value.field.startswith(field)
