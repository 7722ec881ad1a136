"""Logit processors as requests carry them: names and numbers, also as text."""

import numpy as np
import pytest

from rolloutbus.bus.wire.messages.generation import Generate, Processor, SamplingParams
from rolloutbus.trainer_adapter.client.asks import GenerateOptions, ask_of
from rolloutbus.trainer_adapter.client.logit_processors import (
    ActionMaskProcessor,
    DisallowedTokensProcessor,
    TemperatureScheduleProcessor,
    action_mask,
    create_rl_logit_processor,
    disallowed_tokens,
    parse_rl_logit_processor,
    temperature_schedule,
    text_of,
)


@pytest.mark.parametrize(
    "processor",
    [
        action_mask([1, 2, 3]),
        action_mask([4], mask_value=-50.0),
        Processor("action_mask", {"allowed": [1], "mask_value": float("-inf")}),
        disallowed_tokens([]),
        temperature_schedule(2, 0.5, 100),
    ],
)
def test_a_processor_survives_the_way_through_text(processor: Processor) -> None:
    assert parse_rl_logit_processor(text_of(processor)) == processor


def test_processors_have_the_names_and_parameters_that_users_know() -> None:
    assert ActionMaskProcessor(valid_token_ids=[3, 4]) == action_mask([3, 4])
    assert ActionMaskProcessor([3], mask_value=-9.0) == action_mask([3], -9.0)
    assert DisallowedTokensProcessor(disallowed_token_ids=[5]) == disallowed_tokens([5])
    schedule = TemperatureScheduleProcessor(initial_temp=2, final_temp=0.5, warmup_tokens=8)
    assert schedule == temperature_schedule(2, 0.5, 8)


@pytest.mark.parametrize(
    ("asked", "processor"),
    [
        ({"action_mask": [1, 2, 3]}, action_mask([1, 2, 3])),
        ({"disallowed_tokens": [4]}, disallowed_tokens([4])),
        ({"action_mask": [1, 2, 3], "disallowed_tokens": [2]}, action_mask([1, 3])),
    ],
)
def test_token_ids_become_the_text_of_a_processor(
    asked: dict[str, list[int]], processor: Processor
) -> None:
    for given in (asked, {name: np.array(ids) for name, ids in asked.items()}):
        text = create_rl_logit_processor(**given)  # type: ignore[arg-type] - arrays are what users have
        assert text is not None
        assert parse_rl_logit_processor(text) == processor


def test_nothing_asked_for_is_no_processor_and_an_empty_mask_is_refused() -> None:
    assert create_rl_logit_processor() is None
    assert create_rl_logit_processor(disallowed_tokens=[]) is None
    for blocked in ([], [7]):
        with pytest.raises(ValueError, match="no token is left"):
            create_rl_logit_processor(action_mask=blocked, disallowed_tokens=[7])


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"name": 3}', '{"name": "a", "params": {"x": "code"}}', '{"name": "a", "y": 1}'],
)
def test_a_text_that_is_no_processor_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no logit processor"):
        parse_rl_logit_processor(text)


def test_numbers_of_numpy_become_plain_ones() -> None:
    ids = np.array([5, 6], np.int64)
    assert action_mask(ids.tolist()) == action_mask(ids)  # type: ignore[arg-type] - what users do
    assert [type(i) for i in action_mask(ids).params["allowed"]] == [int, int]  # type: ignore[arg-type,union-attr]


def test_short_options_become_processors_before_the_others() -> None:
    schedule = temperature_schedule(1.0, 2.0, 3)
    options = GenerateOptions(action_mask=[7, 8, 9], disallowed_tokens=[8], processors=[schedule])
    body = ask_of([1, 2], SamplingParams(), **options).body
    assert isinstance(body, Generate)
    assert body.processors == [action_mask([7, 8, 9]), disallowed_tokens([8]), schedule]
