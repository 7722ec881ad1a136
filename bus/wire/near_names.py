"""Which name was meant: for calls and values that are given one which does not exist."""

import difflib
from collections.abc import Iterable, Mapping

MIN_LIKENESS = 0.7
"""Of a name that is taken for a misspelt one, as difflib counts."""
MEANT: Mapping[str, str] = {
    "adapter": "lora",
    "inflight": "in_flight",
    "input_ids": "prompt",
    "lora_name": "lora",
    "lora_path": "lora",
    "max_completion_tokens": "max_new_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "model": "policy",
    "nccl": "collective",
    "on_lost": "on_loss",
    "prompt_ids": "prompt",
    "prompt_token_ids": "prompt",
    "sampling_params": "sampling",
    "seed": "sampling_seed",
    "session_id": "session",
    "softmax": "apply_softmax",
    "stop_strings": "stop",
    "timeout": "deadline_s",
    "timeout_s": "deadline_s",
    "truncate_prompt_tokens": "max_prompt_tokens",
    "truncation_side": "truncate",
    "weight_version": "versions",
}
"""What callers of other libraries say -> what it is called here, where that is no near miss."""
RENAMED: Mapping[tuple[str, str], str] = {
    ("in_flight", "in_place"): "keep",
    ("mode", "in_place"): "overwrite",
}
"""Parameter and a value that it took in former versions -> what the value is called now."""


def nearest(name: str, names: Iterable[str]) -> str:
    """The name that was meant; empty if none is near."""
    known = list(names)
    if MEANT.get(name) in known:
        return MEANT[name]
    return next(iter(difflib.get_close_matches(name, known, 1, MIN_LIKENESS)), "")


def no_attribute(thing: object, name: str, renamed: Mapping[str, str]) -> AttributeError:
    """The error for an attribute that does not exist; `renamed`: former name -> present one."""
    message = f"{type(thing).__name__!r} object has no attribute {name!r}"
    if name in renamed:
        message += f": it is called {renamed[name]} now"
    return AttributeError(message, name=name, obj=thing)
