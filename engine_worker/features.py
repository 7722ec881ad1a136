"""Features: what a `generate` asks of an engine beyond what every engine does.

Spec: docs/protocol.md, "What an engine need not be able to do".
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType

from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.generation import NOTHING_MORE, Generate
from rolloutbus.bus.wire.validation import adapter_of

PROCESSOR = "processor:"
"""Before the name of a registered processor."""

SAMPLING_FEATURES = ("min_new_tokens", "stop", "stop_regex", "logit_bias")
WANT_FEATURES = (
    *("top_logprobs", "logprobs_of", "prompt_logprobs", "hidden_states"),
    *("routed_experts", "sampling_mask", "cached_tokens"),
)
"""Features that have the name of the field that asks for them; of hidden states, its value too."""

NOTHING_LOST: Mapping[str, str] = MappingProxyType({})

_TOKENIZER = "an engine of a model has it, with the model's tokenizer.json"
_TEXT = "an sglang engine has it with `text`"
_GRAMMAR = f"{_TEXT}, a transformers engine with `pip install 'rolloutbus[grammar]'`"
_LORA = "an sglang engine has it with `enable_lora`"
_HINTS: Mapping[str, str] = {
    "seed": "an sglang engine has it with the argument `enable_deterministic_inference`",
    "min_new_tokens": "an sglang engine has it without speculative decoding",
    "stop": _TOKENIZER,
    "stop_regex": _TOKENIZER,
    "json_schema": _GRAMMAR,
    "regex": _GRAMMAR,
    "ebnf": _GRAMMAR,
    "structural_tag": _GRAMMAR,
    "hidden_states_last": "an sglang engine has it with `return_hidden_states_mode`",
    "hidden_states_full": "an sglang engine has it with `return_hidden_states_mode` full",
    "routed_experts": "an sglang engine has it with `enable_return_routed_experts`",
    "lora": _LORA,
    "image": f"{_TEXT} and a model that sees",
    "video": f"{_TEXT} and a model that sees",
    "audio": f"{_TEXT} and a model that hears",
}
"""Feature -> which option of which engine would help."""


_COMMAND_HINTS: Mapping[str, str] = {
    "score": "it takes a model that generates or classifies",
    "embed": "it takes an sglang engine with `is_embedding`, and a model made for it",
    "rerank": "it takes an sglang engine with `is_embedding` and `text`, and a cross-encoder",
    "sleep": "an sglang engine has it with `enable_memory_saver`",
    "wake_up": "an sglang engine has it with `enable_memory_saver`",
    "load_lora": f"{_LORA}, on one host and with `dp_size` 1",
    "unload_lora": f"{_LORA}, on one host and with `dp_size` 1",
}
"""Kind of command -> what would help."""


def cannot_do(kind: str) -> Problem:
    """The refusal of a command that an engine does not have."""
    hint = _COMMAND_HINTS.get(kind, "")
    message = f"This worker's engine cannot do {kind!r}" + (f"; {hint}." if hint else ".")
    return Problem("unsupported", message, "not_started")


def lacks_tier(tier: str) -> Problem:
    """The refusal of a tier that an engine's prefix cache does not have."""
    message = (
        f"This worker's engine has no cache tier {tier!r}; an sglang engine has `host` with "
        "`enable_hierarchical_cache`, and `storage` with `hicache_storage_backend` as well."
    )
    return Problem("unsupported", message, "not_started", field="tiers")


def missing(
    body: Generate, features: AbstractSet[str], lost: Mapping[str, str] = NOTHING_LOST
) -> Problem | None:
    """Why an engine with these features cannot serve a request; None if it can.

    `lost`: features that what is installed cannot carry, and why: no option would help.
    """
    for feature, field in needs(body):
        if feature not in features:
            is_processor = feature.startswith(PROCESSOR)
            hint = lost.get(f"{PROCESSOR}*" if is_processor else feature, "")
            if not hint and is_processor:
                known = sorted(each for each in features if each.startswith(PROCESSOR))
                names = ", ".join(each.removeprefix(PROCESSOR) for each in known) or "none"
                hint = f"registered are: {names}"
            hint = hint or _HINTS.get(feature, "")
            message = f"This worker's engine has no {feature}" + (f"; {hint}." if hint else ".")
            return Problem("unsupported", message, "not_started", field=field)
    return None


def needs(body: Generate) -> Iterator[tuple[str, str]]:
    """(feature, field that asks for it) of all that the request asks for."""
    sampling, want = body.sampling, body.want
    if sampling.sampling_seed is not None and sampling.temperature > 0:
        yield "seed", "sampling.sampling_seed"
    for name in SAMPLING_FEATURES:
        if getattr(sampling, name):
            yield name, f"sampling.{name}"
    for name in WANT_FEATURES if want is not NOTHING_MORE else ():
        if wanted := getattr(want, name):
            yield f"{name}_{wanted}" if name == "hidden_states" else name, f"want.{name}"
    if body.grammar is not None:
        yield body.grammar.kind, "grammar"
    for processor in body.processors:
        yield f"{PROCESSOR}{processor.name}", "processors"
    for media in body.media:
        yield media.kind, "media"
    if body.lora:
        yield "lora", "lora"


def unknown_adapter(lora: str, adapters: Mapping[str, int]) -> Problem | None:
    """Why an adapter cannot be used now; None if it is loaded, or none is asked for."""
    named = adapter_of(lora) if lora else None
    if named is None:
        return None
    name, version = named
    if name in adapters and version in (None, adapters[name]):
        return None
    loaded = ", ".join(f"{each}@{number}" for each, number in sorted(adapters.items())) or "none"
    return bad_request("lora", f"{lora} is not loaded; loaded are: {loaded}. Send load_lora first.")
