"""What to ask of a live fleet, to compare with a request that was recorded.

Pure.
"""

import msgspec

from rolloutbus.bus.streams.reassembly import TOKEN_BYTES
from rolloutbus.bus.wire.messages.generation import NOTHING_MORE, Generate, SamplingParams, Want
from rolloutbus.replay.regenerating.asked import Answered

_PLAIN = SamplingParams()
_OF_LOGITS = (
    "temperature",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "min_new_tokens",
)


def to_sample(recorded: Answered) -> Generate:
    """The same request: its sampling, seed and all other rules."""
    return msgspec.structs.replace(recorded.generate, stream=False, prefix=None, want=NOTHING_MORE)


def to_score(recorded: Answered) -> Generate | str:
    """A request whose `prompt_logprobs` are those of the recorded tokens, or why there is none."""
    changes = changes_of_logits(recorded.generate)
    if changes:
        return f"its logprobs are not the model's own: {', '.join(changes)}"
    if not recorded.result.tokens:
        return "it has no tokens"
    start = len(recorded.generate.prompt) // TOKEN_BYTES
    return msgspec.structs.replace(
        recorded.generate,
        prompt=recorded.generate.prompt + recorded.result.tokens,
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
        stream=False,
        prefix=None,
        want=Want(prompt_logprobs=True, prompt_logprobs_start=start),
    )


def changes_of_logits(generate: Generate) -> list[str]:
    """What of a request makes its logprobs differ from what the model says of the tokens."""
    plain, asked = (msgspec.structs.asdict(each) for each in (_PLAIN, generate.sampling))
    changes = [name for name in _OF_LOGITS if asked[name] != plain[name]]
    changes += ["grammar"] if generate.grammar is not None else []
    return changes + [processor.name for processor in generate.processors]
