"""What is asked again is what was asked, or what gives the model's own word on what was sampled."""

import msgspec

from rolloutbus.bus.wire.entry import Placement
from rolloutbus.bus.wire.messages.generation import (
    Generate,
    Generated,
    Grammar,
    Prefix,
    Processor,
    SamplingParams,
    Want,
)
from rolloutbus.replay.regenerating import to_sample, to_score
from rolloutbus.replay.trajectories import Answered
from tests.unit.replay.streams import floats, ints

PLAIN = Generate(
    ints(3, 1), SamplingParams(max_new_tokens=9, top_p=0.9, sampling_seed=4, ignore_eos=True)
)


def recorded(generate: Generate, *tokens: int) -> Answered:
    result = Generated(ints(*tokens), floats(*tokens), [(1, len(tokens))], "stop", 0, 2)
    return Answered("c/1", generate, Placement("p"), result)


def test_a_request_keeps_its_rules_and_leaves_out_what_was_told_besides() -> None:
    prefix = Prefix(ints(5), floats(-1), [(0, 1)])
    asked = msgspec.structs.replace(
        PLAIN, stream=True, prefix=prefix, want=Want(top_logprobs=3), lora="a@2"
    )
    assert to_sample(recorded(asked, 5)) == msgspec.structs.replace(PLAIN, lora="a@2")


def test_scoring_puts_what_was_sampled_behind_the_prompt_and_asks_for_its_logprobs() -> None:
    asked = to_score(recorded(msgspec.structs.replace(PLAIN, lora="a@2"), 5, 6, 7))
    assert isinstance(asked, Generate)
    assert (asked.prompt, asked.lora) == (ints(3, 1, 5, 6, 7), "a@2")
    assert asked.want == Want(prompt_logprobs=True, prompt_logprobs_start=2)
    assert asked.sampling.max_new_tokens == 1


def test_logprobs_of_changed_logits_cannot_be_scored() -> None:
    warm = msgspec.structs.replace(
        PLAIN, sampling=SamplingParams(temperature=0.5, logit_bias={3: 1.0})
    )
    shaped = msgspec.structs.replace(
        PLAIN, grammar=Grammar("regex", "a"), processors=[Processor("action_mask")]
    )
    assert to_score(recorded(warm, 5)) == (
        "its logprobs are not the model's own: temperature, logit_bias"
    )
    assert to_score(recorded(shaped, 5)) == (
        "its logprobs are not the model's own: grammar, action_mask"
    )


def test_nothing_can_be_scored_where_nothing_was_sampled() -> None:
    assert to_score(recorded(PLAIN)) == "it has no tokens"
