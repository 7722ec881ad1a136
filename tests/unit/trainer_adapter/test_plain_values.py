"""What a newcomer writes is accepted, or told in a sentence: never a traceback from the inside."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from rolloutbus import (
    OpenAIClient,
    RolloutClient,
    SyncOpenAIClient,
    SyncRolloutClient,
    SyncWeightPublisher,
    TextClient,
    WeightPublisher,
    connect,
    connect_sync,
)
from rolloutbus.bus.wire.errors import ActorStopped, BusError, Refused, SettingsError
from rolloutbus.bus.wire.messages.generation import Generate, Grammar, Media, SamplingParams, Want
from rolloutbus.trainer_adapter.client.asks import ask_of, batch_prompts, tokens_of
from rolloutbus.trainer_adapter.publisher.publisher import source_of

ADDRESS = "tcp://127.0.0.1:1"
"""Never connected to."""


def client() -> RolloutClient:
    return connect(ADDRESS)


def sync_client() -> SyncRolloutClient:
    return connect_sync(ADDRESS)


def wrong(value: object) -> Any:  # noqa: ANN401 - so that a type checker lets it through
    return value


def sampling_in(given: object) -> SamplingParams:
    body = ask_of([1], wrong(given)).body
    assert isinstance(body, Generate)
    return body.sampling


@pytest.mark.parametrize(
    ("call", "kind", "told"),
    [
        (
            lambda: client().generate([1], SamplingParams(), deadline_s=wrong(None)),
            Refused,
            "a number",
        ),
        (lambda: client().generate([1], SamplingParams(), versions=wrong(7)), Refused, "exact:V"),
        (lambda: client().generate(wrong("hello"), SamplingParams()), Refused, "TextClient"),
        (
            lambda: client().generate(wrong({"input_ids": [1]}), SamplingParams()),
            Refused,
            "input_ids",
        ),
        (lambda: client().generate([1], {"max_tokens": 3}), Refused, "max_new_tokens"),
        (lambda: client().generate([1], wrong(None)), Refused, "SamplingParams or a dict"),
        (
            lambda: client().generate_batch([[1]], SamplingParams(), session=["a", "b"]),
            Refused,
            "2 values for 1 prompts: give one for all, or one for each (field session)",
        ),
        (
            lambda: client().generate_batch([[1], [2]], [SamplingParams()]),
            Refused,
            "1 values for 2 prompts: give one for all, or one for each (field sampling)",
        ),
        (
            lambda: client().generate_batch([[1], [2]], {}, seed=[1, 2, 3]),
            Refused,
            "3 values for 2 prompts: give one for all, or one for each (field seed)",
        ),
        (
            lambda: client().generate_batch([[1]], {}, seed=cast("list[int]", [0.5])),
            Refused,
            "not 0.5",
        ),
        (lambda: client().generate_batch([[1]], {}, seed=1 << 63), Refused, "int64 (field seed)"),
        (
            lambda: client().generate_batch([[1]], {"sampling_seed": 1}, seed=2),
            Refused,
            "in one of the two",
        ),
        (
            lambda: wrong(client()).generate_batch([[1]], {}, on_error="ignore"),
            Refused,
            "raise or return",
        ),
        (
            lambda: client().generate([1], SamplingParams(), session=wrong(["a"])),
            Refused,
            "`generate_batch` takes one for each prompt",
        ),
        (lambda: client().generate([1], {}, deadline_s=1e308), Refused, "more than 1e+12"),
        (lambda: client().generate_batch([[1]], {}, n=1 << 80), Refused, "fewer at once"),
        (
            lambda: client().generate([1], {}, processors=wrong(np.array(1))),
            Refused,
            "processors",
        ),
        (
            lambda: WeightPublisher(client(), rename=wrong(3)),
            SettingsError,
            "rename",
        ),
        (
            lambda: source_of({"w": torch.zeros(2, 2).to_sparse()}),
            SettingsError,
            "'w' is sparse: publish tensor.to_dense()",
        ),
        (
            lambda: source_of({"w": torch.zeros(2, device="meta")}),
            SettingsError,
            "'w' is on the meta device",
        ),
        (lambda: client().sleep(wrong(["disk"])), Refused, "weights, kv_cache or cuda_graph"),
        (lambda: client().sleep(wrong("weights")), Refused, "a list of weights"),
        (lambda: sync_client().generate([1], {}, deadline_s=wrong("3")), Refused, "a number"),
        (
            lambda: WeightPublisher(client()).start({}, transport=wrong("nccl")),
            Refused,
            "nccl is said as 'collective'",
        ),
        (lambda: WeightPublisher(wrong(sync_client())), SettingsError, "SyncWeightPublisher"),
        (lambda: SyncWeightPublisher(wrong(client())), SettingsError, "WeightPublisher takes"),
        (lambda: WeightPublisher(client(), check=wrong("of")), SettingsError, "finite or off"),
        (lambda: WeightPublisher(client(), dtype=wrong("bfloat16")), SettingsError, "a dtype"),
        (lambda: OpenAIClient(wrong(sync_client()), wrong(None)), SettingsError, "SyncOpenAI"),
        (lambda: SyncOpenAIClient(wrong(client()), wrong(None)), SettingsError, "OpenAIClient t"),
        (lambda: TextClient(wrong(sync_client()), wrong(None)), SettingsError, "a RolloutClient"),
        (lambda: TextClient(client(), wrong(None)), SettingsError, "from_pretrained"),
        (lambda: TextClient(client(), wrong("./model")), SettingsError, "from_pretrained"),
        (lambda: OpenAIClient(client(), wrong("./model")), SettingsError, "from_pretrained"),
        (lambda: source_of("/nowhere"), Refused, "/nowhere cannot be read: No such file"),
        (lambda: source_of(Path("/nowhere")), Refused, "/nowhere cannot be read: No such file"),
        (lambda: source_of(wrong(b"bytes")), SettingsError, "the path of its directory"),
        (lambda: source_of(wrong(None)), SettingsError, "a state dict"),
        (lambda: source_of(wrong({"model": {}})), SettingsError, "'model' is no tensor"),
        (lambda: source_of(wrong([torch.zeros(1)])), SettingsError, "(name, tensor) belongs"),
    ],
)
async def test_a_plain_mistake_is_told_in_a_sentence(
    call: Callable[[], Any], kind: type[BusError], told: str
) -> None:
    async def called() -> None:
        await call()

    with pytest.raises(kind) as caught:
        await called()
    assert told in str(caught.value)


def test_a_dict_is_as_good_as_a_sampling() -> None:
    given = {"max_new_tokens": 3, "temperature": 0.5}
    assert sampling_in(given) == SamplingParams(max_new_tokens=3, temperature=0.5)
    (prompt,) = batch_prompts([[1]], {**given, "sampling_seed": 7}, 2)
    asks = prompt.asks(2)
    assert [cast("Generate", each.body).sampling.sampling_seed for each in asks] == [7, 8]


def test_a_top_k_of_minus_one_is_off_and_no_other_negative_one() -> None:
    assert sampling_in(SamplingParams(top_k=-1)) == SamplingParams()
    assert sampling_in({"top_k": -1}) == SamplingParams()
    assert sampling_in(SamplingParams(top_k=-2)).top_k == -2  # which a worker refuses


@pytest.mark.parametrize("n_tokens", [0, -1, -3, -(2**40)])
def test_too_few_tokens_are_told_by_the_name_that_the_caller_knows(n_tokens: int) -> None:
    with pytest.raises(Refused) as caught:
        ask_of([1, 2], SamplingParams(max_new_tokens=n_tokens))
    assert caught.value.field == "sampling.max_new_tokens"


def test_too_many_tokens_are_left_to_the_engine_that_knows_its_limit() -> None:
    ask_of(
        [1, 2], SamplingParams(max_new_tokens=2**31)
    )  # not blamed on the cost that is made of it


@pytest.mark.parametrize(
    ("kind", "field", "told"),
    [
        (SamplingParams, "max_tokens", "did you mean max_new_tokens=?"),
        (SamplingParams, "temprature", "did you mean temperature=?"),
        (SamplingParams, "best_of", "there are max_new_tokens,"),
        (Want, "top_logprob", "did you mean top_logprobs=?"),
    ],
)
def test_a_field_that_does_not_exist_is_told_the_nearest(kind: type, field: str, told: str) -> None:
    with pytest.raises(TypeError) as caught:
        kind(**{field: 1})
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Grammar(wrong("jsonschema"), "{}"), "json_schema, regex, ebnf, structural_tag"),
        (lambda: Media(wrong("picture"), b"x"), "image, video, audio"),
        (lambda: Want(hidden_states=wrong("all")), "'', last, full"),
    ],
)
def test_a_choice_that_does_not_exist_is_told_where_it_is_made(
    make: Callable[[], object], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_numbers_of_numpy_are_numbers() -> None:
    ask = ask_of(
        np.array([1, 2]),
        SamplingParams(),
        deadline_s=float(np.float32(3)),
        priority=wrong(np.int64(4)),
    )
    assert ask.place is not None
    assert ask.place.priority == 4


async def test_a_client_that_was_not_opened_says_how() -> None:
    with pytest.raises(ActorStopped, match="not open; use `async with`"):
        await client().status()
    with pytest.raises(ActorStopped, match="not open; use `with`"):
        sync_client().status()
    sync_client().close()  # as often as one likes
    await client().close()


@pytest.mark.parametrize(
    "prompt",
    [
        [1, -1],
        [1, 2**31],
        *(np.array([1, -1], f"<i{size}") for size in (1, 2, 4, 8)),
        np.array([1, -1], ">i4"),
        np.array([1, 2**31], np.uint32),
        np.array([1, 2**64 - 1], np.uint64),
    ],
)
def test_a_token_id_that_is_no_int32_is_refused(prompt: object) -> None:
    with pytest.raises(Refused, match="negative or does not fit int32") as refused:
        tokens_of(wrong(prompt))
    assert refused.value.field == "prompt"


@pytest.mark.parametrize("dtype", ["u1", "<i2", "<i4", ">i4", "<i8", "<u8"])
def test_token_ids_of_any_width_become_int32(dtype: str) -> None:
    last = min(int(np.iinfo(dtype).max), 2**31 - 1)
    tokens = tokens_of(np.array([0, last], dtype))
    assert (tokens.dtype, tokens.tolist()) == (np.dtype("<i4"), [0, last])


def test_spans_of_time_are_no_token_ids() -> None:
    with pytest.raises(Refused, match="token ids are integers, not timedelta64"):
        tokens_of(np.array([1], "m8[s]"))
