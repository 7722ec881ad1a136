"""One request, as it is, or as another worker would go on with it."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from rolloutbus import Rollout, RolloutClient, SamplingParams
from rolloutbus.bus.wire.messages.generation import Generate, Prefix
from rolloutbus.trainer_adapter.client.asks import GenerateOptions, ask_of
from rolloutbus.trainer_adapter.client.core.requests import Ask
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.models import byte_tokenizer

TOLERANCE = 1e-4
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = [70, 71, 72]


class Case(NamedTuple):
    """One request."""

    prompt: Sequence[int]
    sampling: SamplingParams
    options: GenerateOptions = {}  # noqa: RUF012 - never changed


async def run(client: RolloutClient, case: Case) -> Rollout:
    options: GenerateOptions = {**case.options, "deadline_s": DEADLINE_S}
    return await client.generate(case.prompt, case.sampling, **options)


async def resumed(client: RolloutClient, case: Case, first: Rollout, n_kept: int) -> Rollout:
    """The case again, as another worker would go on with it after `n_kept` tokens."""
    ask = ask_of(case.prompt, case.sampling, **case.options)
    assert isinstance(ask.body, Generate)
    columns = (first.tokens, first.logprobs, first.behaviour_logprobs)
    tokens, logprobs, behaviour = (column[:n_kept].tobytes() for column in columns)
    prefix = Prefix(tokens, logprobs, [(0, n_kept)], behaviour)
    body = msgspec.structs.replace(ask.body, prefix=prefix)
    result = await client.connection.ask(Ask("generate", body, place=ask.place), DEADLINE_S)
    assert isinstance(result, Rollout)
    assert result.n_resumed == n_kept
    return result


def assert_same(one: Rollout, two: Rollout, what: str = "") -> None:
    assert one.tokens.tolist() == two.tokens.tolist(), what
    assert one.finish_reason == two.finish_reason, what
    assert np.abs(one.logprobs - two.logprobs).max() < TOLERANCE, what


def text_of(tokens: Sequence[int]) -> str:
    return cast("Any", byte_tokenizer()).decode(list(tokens))


async def a_stop_text(client: RolloutClient) -> tuple[str, Case, Rollout]:
    """A text of two tokens, and how a request ends with it."""
    free = await run(client, Case(PROMPT, msgspec.structs.replace(GREEDY, max_new_tokens=60)))
    tokens = free.tokens.tolist()
    pairs = (text_of(tokens[i : i + 2]) for i in range(2, len(tokens)))
    text = next(pair for pair in pairs if pair.isascii() and len(pair) > 2)
    sampling = msgspec.structs.replace(GREEDY, max_new_tokens=60, stop=[text])
    case = Case(PROMPT, sampling)
    return text, case, await run(client, case)
