"""Prompts that are too long: refused, or cut where the caller says, and never in silence."""

from typing import Any

import numpy as np
import pytest

from rolloutbus import SamplingParams, connect
from rolloutbus.bus.wire.messages.generation import Generate, Media
from rolloutbus.errors import Refused
from rolloutbus.trainer_adapter.client.asks import Truncate, ask_of, batch_prompts
from rolloutbus.trainer_adapter.client.core.requests import Ask

SAMPLING = SamplingParams(max_new_tokens=4)
PROMPT = [10, 11, 12, 13, 14]


def _prompt_of(ask: Ask) -> list[int]:
    assert isinstance(ask.body, Generate)
    return np.frombuffer(ask.body.prompt, "<i4").tolist()


@pytest.mark.parametrize(
    ("truncate", "n_most", "kept"),
    [
        ("left", 3, [12, 13, 14]),
        ("right", 3, [10, 11, 12]),
        ("left", 1, [14]),
        ("right", 5, PROMPT),
        ("refuse", 5, PROMPT),
        ("refuse", 0, PROMPT),
    ],
)
def test_a_prompt_keeps_the_end_that_is_asked_for(
    truncate: Truncate, n_most: int, kept: list[int]
) -> None:
    ask = ask_of(PROMPT, SAMPLING, truncate=truncate, max_prompt_tokens=n_most)
    assert _prompt_of(ask) == kept
    assert ask.n_prompt_dropped == len(PROMPT) - len(kept)
    assert ask.place is not None
    assert ask.place.cost == len(kept) + 4


def test_each_sample_of_a_batch_says_what_its_prompt_lost() -> None:
    prompts = batch_prompts([PROMPT, PROMPT[:2]], SAMPLING, 2, truncate="left", max_prompt_tokens=3)
    asks = [ask for each in prompts for ask in each.asks(2)]
    assert [ask.n_prompt_dropped for ask in asks] == [2, 2, 0, 0]


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("prompt", {"max_prompt_tokens": 4}),
        ("max_prompt_tokens", {"max_prompt_tokens": -1}),
        ("max_prompt_tokens", {"truncate": "left"}),
        ("truncate", {"truncate": "left", "max_prompt_tokens": 9, "session": "s"}),
        ("truncate", {"truncate": "left", "max_prompt_tokens": 9, "detached": True}),
        ("truncate", {"truncate": "left", "max_prompt_tokens": 9, "media": [Media("image", b"x")]}),
    ],
)
def test_what_would_be_cut_in_silence_is_refused(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refused:
        ask_of(PROMPT, SAMPLING, **options)
    assert refused.value.field == field


async def test_an_end_that_does_not_exist_is_refused_by_its_name() -> None:
    client = connect("ipc:///nowhere")
    end: Any = "middle"
    with pytest.raises(Refused, match="left") as refused:
        await client.generate(PROMPT, SAMPLING, truncate=end, max_prompt_tokens=3)
    assert refused.value.field == "truncate"
