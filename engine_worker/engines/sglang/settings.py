"""What an operator chooses about the SGLang engine."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

OURS: Mapping[str, str] = {
    "model_path": "use `model`",
    "skip_tokenizer_init": "use `text`",
    "max_running_requests": "use `slots`",
    "context_length": "use `max_context`",
    "dtype": "use `dtype`",
    "device": "use `device`",
    "tokenizer_worker_num": "one reads the answers of the scheduler",
}
"""Arguments that follow from the worker's own settings."""

ALIASES: Mapping[str, str] = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
}
"""Other spellings that SGLang's command line and other trainers know."""

ONLY_ONE: Mapping[str, str] = {
    "dp_size": "an update would be judged by its first replica alone; start more workers, "
    "each an engine of its own",
    "pp_size": "pipeline stages do not change their weights together; "
    "split the tensors with tp_size",
    "gpu_id_step": "each engine takes the GPUs right after those of the one before; "
    "choose them with CUDA_VISIBLE_DEVICES",
}
"""Arguments that must be 1, and what to do instead."""


def named(arguments: Mapping[str, object]) -> dict[str, object]:
    """Returns the arguments by SGLang's own names; they may be spelt with hyphens, or shortened.

    Raises:
        ValueError: one is given twice, has a setting of its own, is no number where one is needed,
            or splits the model in a way that cannot be served.
    """
    found: dict[str, object] = {}
    for spelt, value in arguments.items():
        plain = spelt.strip().lstrip("-").replace("-", "_").lower()
        name = ALIASES.get(plain, plain)
        if name in found:
            raise ValueError(f"arguments: {name} is given twice, once as {spelt!r}")
        if name in OURS:
            raise ValueError(f"arguments: {name} follows from the worker's settings; {OURS[name]}")
        found[name] = value
    for name in ("tp_size", *ONLY_ONE):
        n = _whole(name, found, default=1, least=1)
        if name in ONLY_ONE and n > 1:
            raise ValueError(f"arguments: {name}: {n} cannot be served: {ONLY_ONE[name]}")
    _whole("base_gpu_id", found, default=0, least=0)
    return found


def first_gpu(arguments: Mapping[str, object], index: int) -> int:
    """Where the engine of this worker begins; arguments as `named` gives them."""
    first = _whole("base_gpu_id", arguments, default=0, least=0)
    return first + index * tensor_parallel(arguments)


def tensor_parallel(arguments: Mapping[str, object]) -> int:
    """GPUs that share the model's tensors; arguments as `named` gives them."""
    return _whole("tp_size", arguments, default=1, least=1)


def _whole(name: str, arguments: Mapping[str, object], *, default: int, least: int) -> int:
    value = arguments.get(name, default)
    try:
        number = msgspec.convert(value, int, strict=isinstance(value, bool))
    except msgspec.ValidationError:
        number = least - 1
    if number < least:
        raise ValueError(f"arguments: {name}: {value!r} is no whole number of at least {least}")
    return number


Count = Annotated[int, msgspec.Meta(ge=1)]


class SglangSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one engine; checked when it is built."""

    model: str
    """Local directory with config.json and safetensors files. Nothing is downloaded."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    slots: Count = 256
    """Requests that run side by side."""
    max_context: Annotated[int, msgspec.Meta(ge=0)] = 0
    """SGLang's `context_length`, of which it keeps 6 tokens for itself: the rest is for prompt and
    new tokens of one request; 0: what the model was built for."""
    text: bool = False
    """Keep SGLang's tokenizer: needed for stop strings, grammars, `min_new_tokens` and images.
    Token ids go in and out unchanged either way; the engine also spends time on text."""
    coarse_tokens: Count = 32
    """Tokens of a request that nobody streams leave the scheduler in portions of this size."""
    control_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """An engine that has not answered a control call after this long is dead and is replaced."""
    report_prefixes: bool = False
    """Tell the router which beginnings of prompts are cached, so that requests come where theirs
    is. On a GPU, pages have 16 tokens then, unless `page_size` says otherwise."""
    processors: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Logit processors besides the built-in ones: name -> `package.module:factory`."""
    arguments: dict[str, object] = msgspec.field(default_factory=dict[str, object])
    """Any other argument of SGLang's server by name, such as `tp_size`; checked before start."""

    def __post_init__(self) -> None:
        named(self.arguments)
