"""What an operator chooses about the SGLang engine."""

from typing import Annotated, Literal

import msgspec

from rolloutbus.engine_worker.engines.sglang.upstream.split import named

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
