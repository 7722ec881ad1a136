"""What an operator chooses about the transformers engine."""

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]


class TransformersSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one transformers engine; checked when it is built."""

    model: str
    """Local directory with config.json and safetensors files. Nothing is downloaded."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """`dummy`: no weight file is read, version 0 is made up, and a trainer brings the first one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda", "auto"] = "auto"
    slots: Count = 32
    """Requests that run side by side."""
    max_context: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Prompt + new tokens of one request, at most; 0: what the model was built for."""
    kv_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens that the KV cache holds for all requests; 0: slots x max_context, at most 65,536
    beyond one full request."""
    block_size: Count = 16
    """Tokens per KV block, the grain of sharing."""
    prefill_tokens: Count = 2048
    """Prompt tokens computed per step, at most: longer prompts are split over steps."""
    prefix_cache: bool = True
    """Share the KV of equal prompt beginnings; keep it after its request while memory lasts."""
    report_prefixes: bool = False
    """Tell the router which beginnings are kept, so that requests come where theirs is."""
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    """CPU threads of one operation, for the whole process; 0: torch's choice."""
    random_seed: int | None = None
    """Of the stream that seeds requests without a seed; None: from the operating system."""
    processors: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """Logit processors besides the built-in ones: name -> `package.module:factory`."""

    def __post_init__(self) -> None:
        """ValueError names settings that contradict each other."""
        if self.report_prefixes and not self.prefix_cache:
            raise ValueError("report_prefixes: with prefix_cache=false nothing is kept to tell of")
