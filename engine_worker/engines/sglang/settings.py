"""What an operator chooses about the SGLang engine."""

from collections.abc import Mapping
from math import prod
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
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
}
"""Other spellings that SGLang's command line and other trainers know."""

CPU_LORA = "torch_native"
"""SGLang's `lora_backend` without a GPU."""

Kind = Literal["dp", "pp", "tp", "ep"]
"""Of parallelism: replicas, stages of the layers, parts of the tensors, groups of the experts."""
SIZES: tuple[Kind, ...] = ("dp", "pp", "tp", "ep")
ON_GPUS_OF_THEIR_OWN: tuple[Kind, ...] = ("dp", "pp", "tp")
"""Their product is what an engine has of schedulers, and of GPUs; experts are split over `tp`."""
_ATTENTION = (
    "replicas that share their experts change their weights in the midst of each other's steps; "
    "use dp_size alone, whose replicas are whole"
)
ONLY_ONE: Mapping[str, str] = {
    "attn_dp_size": _ATTENTION,
    "dwdp_size": _ATTENTION,
    "gpu_id_step": "each engine takes the GPUs right after those of the one before; "
    "choose them with CUDA_VISIBLE_DEVICES",
}
"""Arguments that must be 1, and what to do instead."""
OF_WHOLE_MODELS: Mapping[str, object] = {
    "enable_lora": None,
    "lora_paths": None,
    "speculative_algorithm": None,
    "enable_hierarchical_cache": None,
    "is_embedding": None,
    "disaggregation_mode": "null",
}
"""Arguments that no pipeline was shown to have (`pp_size`), and what they are without a meaning."""
MEETINGS = ("nccl_port", "dist_init_addr")
"""Arguments that say where the schedulers of one replica meet."""


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
    sizes = {kind: size_of(kind, found) for kind in SIZES}
    for name, why in ONLY_ONE.items():
        n = _whole(name, found, default=1, least=1)
        if n > 1:
            raise ValueError(f"arguments: {name}: {n} cannot be served: {why}")
    if sizes["dp"] > 1:
        _check_replicas(found)
    for name, nothing in OF_WHOLE_MODELS.items():
        if sizes["pp"] > 1 and found.get(name) not in (None, False, "false", nothing):
            raise ValueError(
                f"arguments: {name} cannot be served by a pipeline: leave pp_size out, and split "
                "the tensors with tp_size"
            )
    if found.get("enable_eplb") not in (None, False, "false"):
        raise ValueError(
            "arguments: enable_eplb cannot be served: experts that move between ranks are read "
            "back as others; leave it out"
        )
    _whole("base_gpu_id", found, default=0, least=0)
    return found


def _check_replicas(arguments: Mapping[str, object]) -> None:
    if arguments.get("enable_dp_attention") not in (None, False, "false"):
        raise ValueError(f"arguments: enable_dp_attention cannot be served: {_ATTENTION}")
    for name in MEETINGS:
        if name in arguments:
            raise ValueError(
                f"arguments: {name}: the replicas of dp_size meet at a place each: leave it out"
            )


def first_gpu(arguments: Mapping[str, object], index: int) -> int:
    """Where the engine of this worker begins; arguments as `named` gives them."""
    first = _whole("base_gpu_id", arguments, default=0, least=0)
    return first + index * n_gpus(arguments)


def n_gpus(arguments: Mapping[str, object]) -> int:
    """GPUs of an engine, one for each of its schedulers; arguments as `named` gives them."""
    return prod(size_of(kind, arguments) for kind in ON_GPUS_OF_THEIR_OWN)


def size_of(kind: Kind, arguments: Mapping[str, object]) -> int:
    """How many parts there are of a kind; arguments as `named` gives them, or SGLang's own."""
    return _whole(f"{kind}_size", arguments, default=1, least=1)


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
    """Requests that run side by side, in each replica (`dp_size`)."""
    max_context: Annotated[int, msgspec.Meta(ge=0)] = 0
    """SGLang's `context_length`, of which it keeps 6 tokens for itself: the rest is for prompt and
    new tokens of one request; 0: what the model was built for."""
    text: bool = False
    """Keep SGLang's tokenizer: needed for grammars, images and `rerank`. Token ids go in and
    out unchanged either way; the engine also spends time on text."""
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
        arguments = named(self.arguments)
        if self.device == "cpu" and arguments.get("lora_backend", CPU_LORA) != CPU_LORA:
            raise ValueError(
                f"arguments: lora_backend: on a CPU SGLang has {CPU_LORA} alone; the others are "
                "kernels for GPUs, and would end the engine at the first adapter's request"
            )
        if self.device == "cpu" and size_of("ep", arguments) > 1:
            raise ValueError(
                "arguments: ep_size: on a CPU SGLang cannot split experts over ranks; use tp_size, "
                "which splits each expert"
            )
