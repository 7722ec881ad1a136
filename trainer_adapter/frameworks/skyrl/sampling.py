"""What SkyRL asks of an engine, in the bus's terms: an input batch, vLLM's sampling parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from rolloutbus.bus.wire.messages.generation import SamplingParams
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.client.text import text_until_stop
from rolloutbus.trainer_adapter.openai.bodies import (
    options_of,
    refusal,
    sampling_body,
    sampling_of,
    unsupported,
)
from rolloutbus.trainer_adapter.openai.forms import form_of, grammar_of
from rolloutbus.trainer_adapter.openai.prompts import ChatTokenizer

Json = dict[str, Any]

OF_BATCH = frozenset({"prompts", "prompt_token_ids", "sampling_params", "session_ids"})
NOT_HERE: Mapping[str, str] = {
    "mm_features": "media reach a fleet as `media` of RolloutClient.generate, not by SkyRL",
    "cache_salt": "a prefix cache is never shared between weight versions here, so no salt is "
    "needed: leave it out (generator.use_cache_salt=false)",
}
"""Fields of a batch that must be absent, and why."""
OTHER_NAMES = ("max_generate_length", "max_completion_tokens")
"""What `max_tokens` is called elsewhere."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of a batch."""

    params: SamplingParams
    options: GenerateOptions
    """What they say besides: a grammar, masks, a priority."""
    with_logprobs: bool
    skips_special: bool
    """Whether texts are without special tokens."""
    cut_at: tuple[str, ...]
    """Texts that end a response and are no part of its text; its tokens keep them."""

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Self:
        """Read vLLM's parameters, as `get_sampling_params_for_backend` makes them.

        Also `action_mask` and `disallowed_tokens`, token ids, as of `RolloutClient.generate`.

        Raises:
            Refused: one is unknown, has no valid value, or `max_tokens` is missing.
        """
        fields = _renamed(dict(given or {}))
        n = fields.pop("n", None)
        if n not in (None, 1):
            raise unsupported("n", "one response per prompt: use generator.n_samples_per_prompt")
        masks: GenerateOptions = {}
        for name in ("action_mask", "disallowed_tokens"):
            if fields.get(name) is not None:
                masks[name] = fields[name]
            fields.pop(name, None)
        keeps_stop = bool(fields.pop("include_stop_str_in_output", False))
        body = sampling_body(fields)
        if body.max_tokens is None:
            raise refusal("max_tokens", "how many tokens may a response have? It is not said")
        params = sampling_of(body, body.max_tokens)
        return cls(
            params=params,
            options={**options_of(body), **grammar_of(form_of(body)), **masks},
            with_logprobs=body.logprobs is not None,
            skips_special=body.skip_special_tokens,
            cut_at=() if keeps_stop else tuple(params.stop),
        )

    def text_of(self, tokens: list[int], tokenizer: ChatTokenizer) -> str:
        """The text of a response, up to the stop text that ended it."""
        decode = partial(tokenizer.decode, skip_special_tokens=self.skips_special)
        return text_until_stop(decode, tokens, self.cut_at, self.params.min_new_tokens)


def checked_input(
    batch: Mapping[str, Any], tokenizer: ChatTokenizer
) -> tuple[list[list[int]], list[str] | None]:
    """Token ids of the prompts, and the sessions if there are any.

    Raises:
        Refused: a field is unknown, or there are not exactly one kind of prompts.
    """
    for name, value in batch.items():
        if name in NOT_HERE and value is not None:
            raise unsupported(name, NOT_HERE[name])
        if name not in OF_BATCH and name not in NOT_HERE:
            raise unsupported(name, f"there is no field {name[:64]!r} here; leave it out")
    if (batch.get("prompts") is None) == (batch.get("prompt_token_ids") is None):
        raise refusal("prompt_token_ids", "give either `prompts` or `prompt_token_ids`")
    if batch.get("prompts") is None:
        prompts = batch["prompt_token_ids"]
    else:
        prompts = tokenizer.apply_chat_template(
            batch["prompts"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    sessions = batch.get("session_ids")
    if sessions is None:
        return prompts, None
    if len(sessions) != len(prompts):
        raise refusal("session_ids", f"{len(sessions)} sessions for {len(prompts)} prompts")
    return prompts, ["" if each is None else str(each) for each in sessions]


def _renamed(fields: Json) -> Json:
    for name in OTHER_NAMES:
        value = fields.pop(name, None)
        if value is None:
            continue
        if fields.get("max_tokens") is not None:
            raise refusal(name, "max_tokens says it already: leave one out")
        fields["max_tokens"] = value
    return fields
