"""Logit processors as requests carry them: names and numbers, also as text."""

import numpy as np
import pytest

from rolloutbus.bus.wire.messages.generation import Generate, Processor, SamplingParams
from rolloutbus.trainer_adapter.client.asks import GenerateOptions, ask_of
from rolloutbus.trainer_adapter.client.logit_processors import (
    action_mask,
    create_rl_logit_processor,
    disallowed_tokens,
    parse_rl_logit_processor,
    temperature_schedule,
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
    text = create_rl_logit_processor(processor.name, **processor.params)
    assert parse_rl_logit_processor(text) == processor


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
