"""Names of former versions, and of other libraries, are refused with the name to use instead."""

import inspect
from typing import Any, get_args

import numpy as np
import pytest

import rolloutbus
from rolloutbus import Rollout, SamplingParams
from rolloutbus.bus.wire.messages.generation import GrammarKind
from rolloutbus.errors import Refused
from rolloutbus.events import Finished
from rolloutbus.trainer_adapter.client.transcript import Transcript

TOKENS = np.array([5, 6, 7], np.int32)
LOGPROBS = np.zeros(3, np.float32)
ROLLOUT = Rollout(
    "c/1", TOKENS, LOGPROBS, LOGPROBS, [(2, 1), (3, 2)], "length", "w0", 1, 1, 0, 0, 0
)
FINISHED = Finished("c/1", (1, 1), "w0", "length", TOKENS, LOGPROBS, LOGPROBS, [(2, 3)], 0)


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("seed", "did you mean sampling_seed=?"),
        ("max_tokens", "did you mean max_new_tokens=?"),
        ("max_completion_tokens", "did you mean max_new_tokens=?"),
        ("n", "generate_batch(prompts, sampling, n=...)"),
        ("custom_params", "processors="),
        ("custom_logit_processor", "processors="),
        ("action_mask", "a parameter of the call"),
        ("skip_special_tokens", "TextClient"),
        *((kind, f"grammar=Grammar('{kind}', text)") for kind in get_args(GrammarKind)),
    ],
)
def test_a_sampling_parameter_that_is_called_otherwise_is_told(field: str, told: str) -> None:
    given: dict[str, Any] = {field: 1}
    with pytest.raises(TypeError) as caught:
        SamplingParams(**given)
    assert told in str(caught.value)


def test_sampling_params_have_the_names_of_sglang() -> None:
    names = {
        *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p"),
        *("repetition_penalty", "frequency_penalty", "presence_penalty", "sampling_seed"),
        *("stop", "stop_token_ids", "stop_regex", "ignore_eos", "logit_bias"),
        "no_stop_trim",
    }
    assert set(inspect.signature(SamplingParams).parameters) == names


def test_versions_of_a_result_are_runs_and_a_version_for_each_token() -> None:
    assert ROLLOUT.version_runs == [(2, 1), (3, 2)]
    assert ROLLOUT.token_versions.dtype == np.int64
    assert ROLLOUT.token_versions.tolist() == [2, 3, 3]


@pytest.mark.parametrize(
    ("thing", "name"),
    [(ROLLOUT, "version_runs"), (FINISHED, "version_runs"), (Transcript(), "token_versions")],
)
def test_versions_of_a_result_by_the_former_name_are_told(thing: object, name: str) -> None:
    with pytest.raises(AttributeError, match=f"'versions': it is called {name} now"):
        _ = getattr(thing, "versions")  # noqa: B009 - a type checker knows that there is none
    assert not hasattr(thing, "elsewhere")


@pytest.mark.parametrize(("parameter", "now"), [("in_flight", "keep"), ("mode", "overwrite")])
async def test_in_place_of_a_publication_is_told_as_what_it_is_called_now(
    parameter: str, now: str
) -> None:
    publisher = rolloutbus.WeightPublisher(rolloutbus.connect("ipc:///nowhere"))
    given: dict[str, Any] = {parameter: "in_place"}
    with pytest.raises(Refused, match=f"in_place is said as '{now}'") as caught:
        await publisher.publish({}, **given)
    assert caught.value.field == parameter
