"""What requests may ask of this engine, by how SGLang was started and by its model."""

from collections.abc import Sequence

from rolloutbus.engine_worker.engines.sglang.settings import SglangSettings
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.hooks import VERSION_CHECK
from rolloutbus.engine_worker.engines.sglang.upstream.types import SglangObject

ANY = frozenset({"logit_bias", "top_logprobs", "logprobs_of", "prompt_logprobs", "cached_tokens"})
OF_OUR_ROWS = frozenset({"min_new_tokens", "sampling_mask"})
"""Done in the sampler, one token a step; see `row_processor`."""
OF_TEXT = frozenset({"stop", "stop_regex"})
OF_GRAMMARS = frozenset({"json_schema", "regex", "ebnf", "structural_tag"})


def features_of(
    settings: SglangSettings,
    arguments: SglangObject,
    model: SglangObject,
    processors: Sequence[str],
) -> frozenset[str]:
    """Names of features; see docs/protocol.md, "What an engine need not be able to do".

    Args:
        settings: the operator's.
        arguments: SGLang's server arguments, as it runs with them.
        model: SGLang's `ModelConfig`.
        processors: names of those that are registered.
    """
    found = {*ANY}
    if not is_speculative(arguments):
        found |= OF_OUR_ROWS | {f"processor:{name}" for name in processors}
    if settings.text:
        found |= OF_TEXT | _media_of(model)
        if _says(arguments, "grammar_backend") != "none" and upstream.has_xgrammar():
            found |= OF_GRAMMARS
    if checks_versions(arguments):
        found.add(VERSION_CHECK)
    if has_seeds(arguments):
        found.add("seed")
    if has_priorities(arguments):
        found.add("priority")
    if _says(arguments, "enable_lora"):
        found.add("lora")
    if _says(arguments, "enable_return_routed_experts"):
        found.add("routed_experts")
    mode = _says(arguments, "return_hidden_states_mode")
    if not mode and _says(arguments, "enable_return_hidden_states"):
        mode = "full"
    if mode:
        found |= {"hidden_states_last", f"hidden_states_{mode}"}
    return frozenset(found)


def is_speculative(arguments: SglangObject) -> bool:
    """Whether SGLang guesses several tokens ahead."""
    return bool(_says(arguments, "speculative_algorithm"))


def checks_versions(arguments: SglangObject) -> bool:
    """Whether versions of tokens can be compared with SGLang's account, where it keeps one.

    With speculation a step has several tokens, and not always as many.
    """
    return not is_speculative(arguments)


def has_seeds(arguments: SglangObject) -> bool:
    """Whether SGLang heeds a request's seed."""
    return bool(_says(arguments, "enable_deterministic_inference"))


def has_priorities(arguments: SglangObject) -> bool:
    """Whether SGLang heeds a request's priority."""
    return bool(_says(arguments, "enable_priority_scheduling"))


def has_sessions(arguments: SglangObject) -> bool:
    """Whether SGLang's prefix cache knows which requests belong together."""
    return bool(_says(arguments, "enable_session_radix_cache"))


def _says(arguments: SglangObject, name: str) -> SglangObject:
    return getattr(arguments, name, None)


def _media_of(model: SglangObject) -> set[str]:
    found: set[str] = set()
    if getattr(model, "is_image_understandable_model", False):
        found |= {"image", "video"}
    if getattr(model, "is_audio_understandable_model", False):
        found.add("audio")
    return found
