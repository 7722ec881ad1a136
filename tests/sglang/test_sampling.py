"""What requests may ask of the real SGLang's sampler, with overlapped scheduling and with text.

The transformers engine is the second opinion: the same model, the same rules, written apart.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus import Fleet, Grammar, OpenAIClient, Rollout, RolloutClient, SamplingParams, Want
from rolloutbus.bus.wire.messages.generation import GrammarKind, Processor
from rolloutbus.errors import EngineFailed, Refused
from rolloutbus.trainer_adapter.client import logit_processors
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from rolloutbus.trainer_adapter.client.logit_processors import (
    ActionMaskProcessor,
    DisallowedTokensProcessor,
    TemperatureScheduleProcessor,
    action_mask,
    create_rl_logit_processor,
    disallowed_tokens,
    parse_rl_logit_processor,
    temperature_schedule,
)
from tests.integration.live_fleet import Streamed
from tests.own_processors import SPARED
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import fleet_of
from tests.sglang.models import ENDLESS, EOS, VOCAB_SIZE, byte_tokenizer
from tests.sglang.reference import SameWeights
from tests.sglang.single_requests import (
    GREEDY,
    PROMPT,
    TOLERANCE,
    Case,
    a_stop_text,
    assert_same,
    resumed,
    run,
    text_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

LOW, HIGH = list(range(100, 140)), list(range(400))
OPERATORS = {
    "no_repeats": "tests.own_processors:no_repeats",
    "collected": "tests.own_processors:collected",
}
"""Processors that both engines were started with."""


CASES: Mapping[str, Case] = {
    "plain": Case([5, 6, 7, 8, 9], GREEDY),
    "mask": Case([5, 6, 7], GREEDY, {"action_mask": LOW}),
    "soft mask": Case([5, 6, 8], GREEDY, {"processors": [action_mask(LOW, mask_value=-1.0)]}),
    "blocked": Case([9, 8, 7], GREEDY, {"disallowed_tokens": HIGH}),
    "schedule": Case(
        list(range(20, 90)), GREEDY, {"processors": [temperature_schedule(0.3, 2.0, 6)]}
    ),
    "all three": Case(
        [3, 4],
        GREEDY,
        {
            "processors": [
                temperature_schedule(2.0, 0.5, 4),
                action_mask(LOW),
                disallowed_tokens(LOW[:20]),
            ]
        },
    ),
    "operator's own": Case(
        [50, 51, 52], GREEDY, {"processors": [Processor("no_repeats"), action_mask(LOW)]}
    ),
    "penalties": Case(
        [50, 51, 52],
        msgspec.structs.replace(
            GREEDY, repetition_penalty=1.7, frequency_penalty=0.5, presence_penalty=0.4
        ),
    ),
    "beyond SGLang": Case([50, 51], msgspec.structs.replace(GREEDY, repetition_penalty=3.0)),
    "bias": Case(
        [11, 12],
        msgspec.structs.replace(GREEDY, logit_bias={77: 3.0, 9: -100.0}, frequency_penalty=1.5),
    ),
    "minimum": Case(
        [5, 6, 7, 8, 9],
        SamplingParams(
            max_new_tokens=12, temperature=0.0, min_new_tokens=6, stop_token_ids=[*range(384, 512)]
        ),
    ),
    "own stops": Case(
        [5, 6, 7, 8, 9],
        msgspec.structs.replace(GREEDY, max_new_tokens=40, stop_token_ids=[*range(3, 80)]),
    ),
}
"""Rules that must not touch one another, though they share every batch."""


async def connected(fleet: Fleet, name: str) -> RolloutClient:
    settings = ClientSettings(name=name, router=fleet.address, overtime_s=DEADLINE_S)
    return await RolloutClient(settings).__aenter__()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sglang(llama: Path) -> AsyncIterator[RolloutClient]:
    options = fleet_of(
        llama, text=True, disable_overlap_schedule=False, enable_return_hidden_states=True
    )
    assert "engine_options" in options
    options["engine_options"] = {**options["engine_options"], "processors": OPERATORS}
    async with rolloutbus.up(**options) as fleet:
        client = await connected(fleet, "sampling")
        yield client
        await client.__aexit__(None, None, None)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def other(llama: Path) -> AsyncIterator[RolloutClient]:
    """The same model on the transformers engine."""
    options: dict[str, Any] = {"device": "cpu", "max_context": 2048, "threads": 1}
    options["processors"] = OPERATORS
    async with rolloutbus.up(model=llama, workers=1, engine_options=options) as fleet:
        client = await connected(fleet, "opinion")
        yield client
        await client.__aexit__(None, None, None)


async def test_mixed_rows_of_one_batch_give_what_each_gives_alone(sglang: RolloutClient) -> None:
    mixed = await asyncio.gather(*(run(sglang, case) for case in CASES.values()))
    for case, together in zip(CASES.values(), mixed, strict=True):
        assert_same(await run(sglang, case), together)


@pytest.mark.shows(
    "min_new_tokens",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "action_mask",
    "disallowed_tokens",
    "enable_custom_logit_processor",
)
async def test_both_engines_give_the_same(sglang: RolloutClient, other: RolloutClient) -> None:
    cases = CASES.values()
    here = await asyncio.gather(*(run(sglang, case) for case in cases))
    there = await asyncio.gather(*(run(other, case) for case in cases))
    for name, one, two in zip(CASES, here, there, strict=True):
        assert_same(one, two, name)


@pytest.mark.parametrize("engine", ["sglang", "other"])
async def test_no_collection_looks_at_what_an_engine_has_loaded(
    engine: str, sglang: RolloutClient, other: RolloutClient
) -> None:
    """A full one would hold up tokens for 0.4 to 0.6 s."""
    client = sglang if engine == "sglang" else other
    rollout = await client.generate([3, 4], GREEDY, processors=[Processor("collected")])
    assert {*rollout.tokens.tolist()} == {SPARED}


@pytest.mark.shows("presence_penalty")
@pytest.mark.parametrize("name", CASES)
async def test_a_resumed_request_goes_on_as_if_it_had_never_stopped(
    sglang: RolloutClient, name: str
) -> None:
    whole = await run(sglang, CASES[name])
    for n_kept in (1, 5):
        assert_same(await resumed(sglang, CASES[name], whole, n_kept), whole)


@pytest.mark.shows("repetition_penalty", "frequency_penalty")
@pytest.mark.shows(
    "RLActionMaskProcessor",
    "mask_value",
    "DisallowedTokensProcessor",
    "TemperatureScaleProcessor",
    "create_rl_logit_processor",
    "parse_rl_logit_processor",
)
async def test_processors_do_what_their_known_names_say(
    sglang: RolloutClient, other: RolloutClient, llama: Path
) -> None:
    reference = SameWeights(llama)
    both = create_rl_logit_processor(action_mask=LOW, disallowed_tokens=LOW[:20])
    assert both is not None
    hot_as_text = logit_processors.text_of(TemperatureScheduleProcessor(1, 2, 0))
    asked = {
        "mask": ActionMaskProcessor(LOW),
        "a mask that anything outweighs": ActionMaskProcessor(LOW, mask_value=1e6),
        "blocked": DisallowedTokensProcessor(HIGH),
        "text": parse_rl_logit_processor(both),
        "twice as hot": parse_rl_logit_processor(hot_as_text),
    }
    for client in (sglang, other):
        told = {
            name: await run(client, Case([5, 6, 7], GREEDY, {"processors": [each]}))
            for name, each in asked.items()
        }
        tokens = {name: {*rollout.tokens.tolist()} for name, rollout in told.items()}
        assert tokens["mask"] <= {*LOW}
        assert not tokens["a mask that anything outweighs"] & {*LOW}
        assert not tokens["blocked"] & {*HIGH}
        assert tokens["text"] <= {*LOW[20:]}
        hot = told["twice as hot"]
        assert np.abs(hot.logprobs - reference.fresh([5, 6, 7], hot, 2.0)).max() < TOLERANCE


@pytest.mark.shows("custom_logit_processor")
async def test_an_operators_processor_sees_the_tokens_so_far(
    sglang: RolloutClient, other: RolloutClient
) -> None:
    case = CASES["operator's own"]
    for client in (sglang, other):
        whole = await run(client, case)
        assert len({*whole.tokens.tolist()}) == case.sampling.max_new_tokens
        assert_same(await resumed(client, case, whole, 5), whole)


async def test_rules_hold_when_the_cache_is_dropped_on_the_way(sglang: RolloutClient) -> None:
    endless = msgspec.structs.replace(
        GREEDY, max_new_tokens=ENDLESS, repetition_penalty=1.3, frequency_penalty=0.2
    )
    case = Case([50, 51, 52], endless, {"processors": [temperature_schedule(0.5, 1.5, 200)]})
    options: GenerateOptions = {**case.options, "deadline_s": DEADLINE_S}
    streamed = Streamed(sglang, case.prompt, endless, **options)
    for n_tokens in (20, 300):
        await streamed.reached(n_tokens)
        await sglang.pause("retract")
        await sglang.resume()
    await streamed.reached(1200)
    again = await streamed.cut()

    as_long = msgspec.structs.replace(endless, max_new_tokens=len(again.tokens))
    whole = await run(sglang, case._replace(sampling=as_long))
    assert again.tokens.tolist() == whole.tokens.tolist()
    assert np.abs(again.logprobs - whole.logprobs).max() < TOLERANCE


TRUNCATED: Mapping[str, SamplingParams] = {
    "top_k": SamplingParams(max_new_tokens=16, temperature=0.9, top_k=5, ignore_eos=True),
    "top_p": SamplingParams(max_new_tokens=16, temperature=0.9, top_p=0.5, ignore_eos=True),
    "min_p": SamplingParams(max_new_tokens=16, temperature=0.9, min_p=0.2, ignore_eos=True),
    "all": SamplingParams(
        max_new_tokens=16, temperature=1.2, top_k=7, top_p=0.8, min_p=0.05, ignore_eos=True
    ),
    "one": SamplingParams(max_new_tokens=16, temperature=0.7, top_k=1, ignore_eos=True),
    "nothing": SamplingParams(max_new_tokens=16, temperature=0.7, ignore_eos=True),
    "greedy": SamplingParams(max_new_tokens=16, temperature=0.0, top_k=9, ignore_eos=True),
}


@pytest.mark.shows("top_k", "top_p", "min_p")
async def test_behaviour_logprobs_are_renormalised_over_what_was_sampled_from(
    sglang: RolloutClient,
) -> None:
    want = Want(logprobs_of=[*range(128)], sampling_mask=True)
    wants: GenerateOptions = {"want": want, "action_mask": [*range(3, 128)]}
    cases = [Case([8, 9, 10], sampling, wants) for sampling in TRUNCATED.values()]
    rollouts = await asyncio.gather(*(run(sglang, case) for case in cases))
    for name, rollout in zip(TRUNCATED, rollouts, strict=True):
        supports = supports_of(rollout)
        for i, token in enumerate(rollout.tokens.tolist()):
            assert token in supports[i], name
            # Of ids below 128 only can be sampled: their logprobs are the whole distribution.
            mass = np.log(np.exp(rollout.arrays["logprobs_of"][i][supports[i]].astype(float)).sum())
            expected = rollout.logprobs[i] - (0.0 if name == "greedy" else mass)
            assert abs(rollout.behaviour_logprobs[i] - expected) < TOLERANCE, name
    sizes = {name: len(supports_of(r)[0]) for name, r in zip(TRUNCATED, rollouts, strict=True)}
    assert (sizes["top_k"], sizes["one"], sizes["greedy"], sizes["nothing"]) == (5, 1, 1, 125)


def supports_of(rollout: Rollout) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    counts = rollout.arrays["sampling_mask_counts"]
    return np.split(rollout.arrays["sampling_mask"], np.cumsum(counts)[:-1])


async def test_a_top_k_of_one_is_told_with_its_temperature(
    sglang: RolloutClient, other: RolloutClient
) -> None:
    case = Case([8, 9], TRUNCATED["one"])
    assert_same(await run(sglang, case), await run(other, case))


@pytest.mark.shows("logprobs: N", "token_ids_logprob", "return_sampling_mask")
async def test_what_is_wanted_of_each_token_is_the_same_on_both_engines(
    sglang: RolloutClient, other: RolloutClient
) -> None:
    want = Want(top_logprobs=4, logprobs_of=[7, 8, 400], sampling_mask=True)
    case = Case([33, 34], GREEDY, {"want": want})
    # Beside requests that want something else, which SGLang alone would end at.
    here, *_ = await asyncio.gather(*(run(sglang, each) for each in (case, *CASES.values())))
    there = await run(other, case)
    assert here.arrays.keys() == there.arrays.keys()
    for name, values in here.arrays.items():
        assert values.dtype == there.arrays[name].dtype
        assert np.abs(values - there.arrays[name]).max() < TOLERANCE, name


async def test_arrays_of_a_resumed_request_begin_where_it_went_on(sglang: RolloutClient) -> None:
    case = Case([33, 34], GREEDY, {"want": Want(top_logprobs=2, logprobs_of=[7])})
    whole = await run(sglang, case)
    again = await resumed(sglang, case, whole, 5)
    for name, values in again.arrays.items():
        assert np.abs(values - whole.arrays[name][5:]).max() < TOLERANCE, name


@pytest.mark.shows("logprob_start_len")
async def test_prompt_logprobs_are_those_of_a_forward_pass(
    sglang: RolloutClient, other: RolloutClient
) -> None:
    prompt = [*range(10, 110)]
    want = Want(prompt_logprobs=True, prompt_logprobs_start=97, top_logprobs=3, logprobs_of=[1, 5])
    told = (await run(sglang, Case(prompt, GREEDY, {"want": want}))).arrays
    assert {name: array.shape for name, array in told.items() if name.startswith("prompt")} == {
        "prompt_logprobs": (3,),
        "prompt_top_logprobs": (3, 3),
        "prompt_top_token_ids": (3, 3),
        "prompt_logprobs_of": (3, 2),
    }
    one = msgspec.structs.replace(GREEDY, max_new_tokens=1)
    wanted = Want(logprobs_of=[1, 5, *prompt[97:]], top_logprobs=3)
    for i in range(3):
        truth = (await run(other, Case(prompt[: 97 + i], one, {"want": wanted}))).arrays
        assert abs(told["prompt_logprobs"][i] - truth["logprobs_of"][0, 2 + i]) < TOLERANCE
        of = told["prompt_logprobs_of"][i] - truth["logprobs_of"][0, :2]
        assert np.abs(of).max() < TOLERANCE
        assert told["prompt_top_token_ids"][i].tolist() == truth["top_token_ids"][0].tolist()


async def test_the_first_token_of_a_prompt_has_no_logprob(sglang: RolloutClient) -> None:
    told = await run(sglang, Case([9, 8, 7], GREEDY, {"want": Want(prompt_logprobs=True)}))
    assert np.isnan(told.arrays["prompt_logprobs"]).tolist() == [True, False, False]


@pytest.mark.shows("return_hidden_states", "hidden_states")
async def test_hidden_states_are_those_of_the_last_token_or_of_all(sglang: RolloutClient) -> None:
    prompt = [201, 202, 203, 204]
    full = await run(sglang, Case(prompt, GREEDY, {"want": Want(hidden_states="full")}))
    last = await run(sglang, Case(prompt, GREEDY, {"want": Want(hidden_states="last")}))
    states = full.arrays["hidden_states"]
    assert states.shape == (len(prompt) + len(full.tokens) - 1, 64)
    assert last.arrays["hidden_states"].shape == (1, 64)
    assert np.abs(states[-1] - last.arrays["hidden_states"][0]).max() < TOLERANCE


@pytest.mark.shows("stop", "stop_regex")
async def test_a_stop_text_ends_a_request_and_stays_in_it(
    sglang: RolloutClient, other: RolloutClient
) -> None:
    text, case, whole = await a_stop_text(sglang)
    assert whole.finish_reason == "stop"
    assert text in text_of(whole.tokens.tolist())
    assert text not in text_of(whole.tokens.tolist()[:-1])
    assert_same(whole, await run(other, case))
    by_regex = msgspec.structs.replace(case.sampling, stop=[], stop_regex=[re.escape(text)])
    assert_same(whole, await run(sglang, case._replace(sampling=by_regex)))


async def test_a_stop_text_that_began_before_a_request_was_resumed_ends_it(
    sglang: RolloutClient,
) -> None:
    _, case, whole = await a_stop_text(sglang)
    for n_kept in range(1, len(whole.tokens)):
        assert_same(await resumed(sglang, case, whole, n_kept), whole)


GRAMMARS: dict[GrammarKind, str] = {
    "regex": "[ab]{4}c[0-9]{6}x",
    "ebnf": 'root ::= "yes" | "no"',
    "json_schema": '{"enum": ["left", "right"]}',
    "structural_tag": """{"type": "structural_tag", "format": {"type": "tag", "begin": "<side>",
        "content": {"type": "json_schema", "json_schema": {"enum": ["left", "right"]}},
        "end": "</side>"}}""",
}
MATCHED: dict[GrammarKind, str] = {
    "regex": GRAMMARS["regex"],
    "ebnf": "yes|no",
    "json_schema": '"(left|right)"',
    "structural_tag": '<side>"(left|right)"</side>',
}


@pytest.mark.shows("json_schema", "regex", "ebnf", "structural_tag", "skip_tokenizer_init")
@pytest.mark.parametrize("kind", GRAMMARS)
async def test_a_grammar_is_kept_to_also_after_a_request_was_resumed(
    sglang: RolloutClient, kind: GrammarKind
) -> None:
    grammar = Grammar(kind, GRAMMARS[kind])
    sampling = SamplingParams(max_new_tokens=40, temperature=0.0, frequency_penalty=1.0)
    case = Case(PROMPT, sampling, {"grammar": grammar})
    whole = await run(sglang, case)
    assert whole.tokens[-1] == EOS
    text = text_of(whole.tokens.tolist()[:-1])
    assert re.fullmatch(MATCHED[kind], text)
    for n_kept in (1, len(whole.tokens) - 1):
        assert_same(await resumed(sglang, case, whole, n_kept), whole)


UNIT = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
NOTHING = {"type": "object", "additionalProperties": False}
FORCED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in (
            ("weather", {**UNIT, "additionalProperties": False}),
            ("stop", NOTHING),
        )
    ],
    "max_tokens": 1000,
    "timeout": DEADLINE_S,
}


@pytest.mark.shows("tool_choice")
@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"weather", "stop"}),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, {"weather"}),
    ],
)
async def test_a_forced_call_is_one_of_a_tool_that_there_is(
    sglang: RolloutClient, asked: dict[str, Any], names: set[str]
) -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    openai = OpenAIClient(sglang, tokenizer)
    whole = await openai.chat_completion({**FORCED, **asked, "n": 4})
    streamed = openai.chat_completion_stream({**FORCED, **asked})
    chunks = [choice async for chunk in streamed for choice in chunk["choices"]]
    calls = [call for each in chunks for call in each["delta"].get("tool_calls", ())]
    for choice in whole["choices"]:
        assert not choice["message"]["content"]
        calls += choice["message"]["tool_calls"]
    assert {chunks[-1]["finish_reason"], *(each["finish_reason"] for each in whole["choices"])} == {
        "tool_calls"
    }
    assert len(calls) == 5
    for call in calls:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        assert name in names
        assert arguments in ([{"unit": "C"}, {"unit": "F"}] if name == "weather" else [{}])


@pytest.mark.parametrize(
    ("case", "field"),
    [
        (Case(PROMPT, GREEDY, {"action_mask": []}), "processors"),
        (Case(PROMPT, GREEDY, {"action_mask": [VOCAB_SIZE]}), "processors"),
        (Case(PROMPT, GREEDY, {"processors": [temperature_schedule(0, 1, 2)]}), "processors"),
        (Case(PROMPT, msgspec.structs.replace(GREEDY, stop_regex=["(("])), "sampling.stop_regex"),
        (Case(PROMPT, GREEDY, {"action_mask": [5], "disallowed_tokens": [5]}), "processors"),
        (
            Case(
                PROMPT,
                SamplingParams(max_new_tokens=5, min_new_tokens=3),
                {"action_mask": [EOS]},
            ),
            "processors",
        ),
        (
            Case(
                PROMPT,
                GREEDY,
                {"grammar": Grammar("ebnf", GRAMMARS["ebnf"]), "action_mask": [7]},
            ),
            "processors",
        ),
        (Case(PROMPT, GREEDY, {"grammar": Grammar("json_schema", "{nope")}), ""),
    ],
)
async def test_what_cannot_be_sampled_fails_alone(
    sglang: RolloutClient, case: Case, field: str
) -> None:
    plain = await run(sglang, CASES["plain"])
    neighbour = asyncio.create_task(run(sglang, CASES["plain"]))
    with pytest.raises((Refused, EngineFailed)) as caught:
        await run(sglang, case)
    assert caught.value.problem.code == "bad_request"
    assert caught.value.problem.field == field
    assert_same(await neighbour, plain)
