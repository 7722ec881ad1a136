"""Which name was meant: for calls and values that are given one which does not exist."""

import difflib
import re
from collections.abc import Iterable, Mapping

import msgspec
import msgspec.inspect

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


def meant_field(error: msgspec.DecodeError, kind: type) -> str:
    """What to say behind an error about a field that `kind` does not have; mostly empty."""
    found = _UNKNOWN_FIELD.search(str(error))
    if found is None:
        return ""
    structs = _structs_in(msgspec.inspect.type_info(kind))
    for name in filter(None, (found[2] or "").split(".")):
        fields = [each for struct in structs for each in struct.fields]
        structs = [
            struct for each in fields if each.name == name for struct in _structs_in(each.type)
        ]
    near = nearest(found[1], [each.name for struct in structs for each in struct.fields])
    return f"; did you mean `{near}`?" if near else ""


_UNKNOWN_FIELD = re.compile(r"unknown field `(.+?)`(?: - at `\$\.?(.*)`)?")
"""As msgspec says it: the name, and where."""


def _structs_in(kind: msgspec.inspect.Type) -> list[msgspec.inspect.StructType]:
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else [kind]
    return [each for each in kinds if isinstance(each, msgspec.inspect.StructType)]


def no_attribute(thing: object, name: str, renamed: Mapping[str, str]) -> AttributeError:
    """The error for an attribute that does not exist; `renamed`: former name -> present one."""
    message = f"{type(thing).__name__!r} object has no attribute {name!r}"
    if name in renamed:
        message += f": it is called {renamed[name]} now"
    return AttributeError(message, name=name, obj=thing)
