"""Stop texts and patterns on a real SGLang that was started without `text`: token ids alone."""

import re

import msgspec
import pytest

from rolloutbus import RolloutClient, SamplingParams, TextClient, Want
from rolloutbus.errors import EngineFailed
from tests.integration.live_fleet import Streamed
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.models import EOS, FIRST_BYTE, byte_tokenizer
from tests.sglang.single_requests import (
    Case,
    a_stop_text,
    assert_same,
    resumed,
    run,
    text_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

NEVER_DONE = "(a|aa)+[b-z]"
"""A pattern that backtracks without end in a row of `a`."""


@pytest.mark.shows("stop", "stop_regex")
async def test_a_stop_text_ends_a_request_of_token_ids(client: RolloutClient) -> None:
    text, case, whole = await a_stop_text(client)
    tokens = whole.tokens.tolist()
    assert whole.finish_reason == "stop"
    assert text in text_of(tokens)
    assert text not in text_of(tokens[:-1])
    by_regex = msgspec.structs.replace(case.sampling, stop=[], stop_regex=[re.escape(text)])
    assert_same(whole, await run(client, case._replace(sampling=by_regex)))
    streamed = Streamed(client, list(case.prompt), case.sampling)
    assert_same(whole, await streamed.rollout(DEADLINE_S))
    assert streamed.tokens == tokens


@pytest.mark.shows("min_new_tokens")
@pytest.mark.parametrize("name", ["stop", "stop_regex"])
async def test_a_stop_text_within_the_least_number_of_tokens_ends_nothing(
    client: RolloutClient, name: str
) -> None:
    text, case, whole = await a_stop_text(client)
    n = len(whole.tokens)
    asked = {"stop": [], name: [text if name == "stop" else re.escape(text)]}
    asked |= {"max_new_tokens": n + 40, "ignore_eos": True}
    at_least = {
        least: await run(
            client,
            case._replace(
                sampling=msgspec.structs.replace(case.sampling, **asked, min_new_tokens=least)
            ),
        )
        for least in (n - 1, n)
    }
    assert at_least[n - 1].tokens.tolist() == whole.tokens.tolist()
    longer = at_least[n].tokens.tolist()
    assert longer[:n] == whole.tokens.tolist()
    assert len(longer) > n + 1, "it is not found late, either"


@pytest.mark.parametrize("name", ["stop", "stop_regex"])
async def test_a_stop_text_counts_from_the_first_attempt_on(
    client: RolloutClient, name: str
) -> None:
    text, case, _ = await a_stop_text(client)
    asked = {"stop": [], name: [text if name == "stop" else f"^(?s:.*){re.escape(text)}"]}
    wanted = Want(prompt_logprobs=True, top_logprobs=2)
    case = Case(case.prompt, msgspec.structs.replace(case.sampling, **asked), {"want": wanted})
    whole = await run(client, case)
    assert whole.finish_reason == "stop"
    # The last of these has been completed: its end was lost, and no more of it.
    for n_kept in range(1, len(whole.tokens) + 1):
        again = await resumed(client, case, whole, n_kept)
        assert_same(again, whole)
        assert len(again.arrays["prompt_logprobs"]) == len(case.prompt)


async def test_a_request_whose_stop_token_is_there_already_samples_no_more(
    client: RolloutClient,
) -> None:
    # One token in 43 ends it.
    sampling = SamplingParams(max_new_tokens=2000, temperature=1.0, logit_bias={EOS: 3.0})
    case = Case([70, 71, 72], sampling)
    whole = await run(client, case)
    assert whole.finish_reason == "stop"
    assert_same(await resumed(client, case, whole, len(whole.tokens)), whole)


@pytest.mark.shows("no_stop_trim")
async def test_text_is_made_without_its_stop_text_unless_it_is_to_stay(
    client: RolloutClient,
) -> None:
    text, case, whole = await a_stop_text(client)
    texts = TextClient(client, byte_tokenizer())
    prompt = text_of(list(case.prompt))
    trimmed = await texts.generate(prompt, case.sampling, deadline_s=DEADLINE_S)
    kept = await texts.generate(
        prompt, msgspec.structs.replace(case.sampling, no_stop_trim=True), deadline_s=DEADLINE_S
    )
    for each in (trimmed, kept):
        assert each.rollout.tokens.tolist() == whole.tokens.tolist()
    assert kept.text == text_of(whole.tokens.tolist())
    assert kept.text == trimmed.text + text


async def test_patterns_that_cannot_be_looked_for_end_their_requests_alone(
    client: RolloutClient,
) -> None:
    plain = Case([70, 71], SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True))
    many_a = {FIRST_BYTE + ord("a"): 100.0}
    slow = msgspec.structs.replace(plain.sampling, stop_regex=[NEVER_DONE], logit_bias=many_a)
    none = msgspec.structs.replace(plain.sampling, stop_regex=["(("])
    with pytest.raises(EngineFailed) as gave_up:
        await run(client, plain._replace(sampling=slow))
    with pytest.raises(EngineFailed) as refused:
        await run(client, plain._replace(sampling=none))
    for caught in (gave_up, refused):
        assert (caught.value.problem.code, caught.value.problem.field) == (
            "bad_request",
            "sampling.stop_regex",
        )
    assert "simplify it" in gave_up.value.problem.message
    assert len((await run(client, plain)).tokens) == 60
