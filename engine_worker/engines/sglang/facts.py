"""What callers may rely on of an SGLang engine, and what it can do; found by looking."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, cast

import torch
import transformers

from rolloutbus.engine_worker.engine import EngineFacts
from rolloutbus.engine_worker.engines.sglang.guard import Abilities
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import Ready, SchedulerRank
from rolloutbus.engine_worker.engines.sglang.settings import (
    ON_GPUS_OF_THEIR_OWN,
    SIZES,
    SglangSettings,
    size_of,
)
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.hooks import VERSION_CHECK
from rolloutbus.engine_worker.engines.sglang.upstream.types import SglangHandle, SglangObject
from rolloutbus.engine_worker.weights.torch_tensors import gpus_of

OF_TEXT = frozenset({"stop", "stop_regex"})
"""Of models with a tokenizer; see `text_stops`."""
ANY = OF_TEXT | {"logit_bias", "top_logprobs", "logprobs_of", "prompt_logprobs", "cached_tokens"}
OF_OUR_ROWS = frozenset({"min_new_tokens", "sampling_mask"})
"""Done in the sampler, one token a step; see `row_processor`."""
OF_GRAMMARS = frozenset({"json_schema", "regex", "ebnf", "structural_tag"})
OF_ONE_STAGE = OF_GRAMMARS | {
    *("image", "video", "audio", "routed_experts", "hidden_states_last", "hidden_states_full"),
    VERSION_CHECK,
}
"""Not in a pipeline: what a stage has of it stays there, or it was not shown."""
BY_ARGUMENT: Mapping[str, str] = {
    "enable_deterministic_inference": "seed",
    "enable_priority_scheduling": "priority",
    "enable_lora": "lora",
    "enable_return_routed_experts": "routed_experts",
}
"""Argument of SGLang -> the feature that requests have with it."""


class Devices:
    """The GPUs that SGLang computes on; none with a CPU."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """`arguments`: SGLang's own, as they came out in the end."""
        self._devices: list[torch.device] = []
        if str(arguments.get("device", "")).startswith("cuda"):
            first = int(arguments["base_gpu_id"])
            n_gpus = len(ranks_of(arguments))
            self._devices = [torch.device("cuda", first + i) for i in range(n_gpus)]

    @property
    def are_there(self) -> bool:
        """Whether there are any."""
        return bool(self._devices)

    @property
    def uuids(self) -> tuple[str, ...]:
        """As nvidia-smi shows them."""
        return gpus_of(self._devices)

    def used_bytes(self) -> int:
        """Memory in use on all of them, by anybody; 0 with a CPU."""
        cuda = cast("Any", torch.cuda)  # untyped
        return sum(int(cuda.device_memory_used(device)) for device in self._devices)


def ranks_of(arguments: Mapping[str, Any]) -> list[SchedulerRank]:
    """Of all schedulers of an engine; each has a GPU of its own."""
    sizes = (range(size_of(kind, arguments)) for kind in ON_GPUS_OF_THEIR_OWN)
    return [SchedulerRank(*rank) for rank in product(*sizes)]


def facts_of(
    engine: SglangHandle,
    settings: SglangSettings,
    arguments: Mapping[str, Any],
    features: frozenset[str],
    ready: Sequence[Ready],
) -> EngineFacts:
    """Facts of an engine that was started.

    Args:
        engine: SGLang's.
        settings: the operator's.
        arguments: SGLang's own, as they came out in the end.
        features: what a `generate` may ask for.
        ready: what each scheduler told when it was built.
    """
    model = engine.tokenizer_manager.model_config
    return EngineFacts(
        kind="sglang",
        vocab_size=model.vocab_size,
        max_context=_max_context(ready, int(arguments["page_size"])),
        slots=settings.slots * size_of("dp", arguments),
        eos_token_ids=tuple(sorted(model.hf_eos_token_id or ())),
        gpus=Devices(arguments).uuids,
        features=features,
        parallel={kind: size_of(kind, arguments) for kind in SIZES},
        software={
            "sglang": upstream.version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
        is_made_up=str(arguments.get("load_format")) == "dummy",
    )


def _max_context(ready: Sequence[Ready], page_size: int) -> int:
    """Prompt + new tokens that no replica ever cuts short, also of a request that is resumed.

    SGLang does so without a word when it thinks that a request may not fit, and refuses input that
    comes within a few tokens of the context's end.
    """
    rooms = ((r.max_req_input_len, r.max_total_num_tokens - 2 * page_size) for r in ready)
    return min(min(room) for room in rooms)


def abilities_of(arguments: Mapping[str, Any]) -> Abilities:
    """What an engine with these arguments, as they came out in the end, lets be done with it."""
    return Abilities(
        keeps_weights=bool(arguments.get("enable_weights_cpu_backup")),
        flushes_queued=upstream.flushes_beside_a_queue(),
        has_replicas=size_of("dp", arguments) > 1,
        has_stages=size_of("pp", arguments) > 1,
        shares_weights=arguments.get("weight_cache_mode", "off") not in ("off", None),
        mixes_versions=bool(arguments.get("hicache_storage_backend"))
        and not upstream.stores_by_namespace(),
    )


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
        # With speculation a step has several tokens, and not always as many.
        found.add(VERSION_CHECK)
    if settings.text:
        found |= _media_of(model)
        if getattr(arguments, "grammar_backend", None) != "none" and upstream.has_xgrammar():
            found |= OF_GRAMMARS
    found |= {feature for name, feature in BY_ARGUMENT.items() if getattr(arguments, name, None)}
    mode = getattr(arguments, "return_hidden_states_mode", None)
    if not mode and getattr(arguments, "enable_return_hidden_states", None):
        mode = "full"
    if mode:
        found |= {"hidden_states_last", f"hidden_states_{mode}"}
    if getattr(arguments, "pp_size", 1) > 1:
        found -= OF_ONE_STAGE
    return frozenset(found)


def is_speculative(arguments: SglangObject) -> bool:
    """Whether SGLang guesses several tokens ahead."""
    return bool(getattr(arguments, "speculative_algorithm", None))


def _media_of(model: SglangObject) -> set[str]:
    found: set[str] = set()
    if getattr(model, "is_image_understandable_model", False):
        found |= {"image", "video"}
    if getattr(model, "is_audio_understandable_model", False):
        found.add("audio")
    return found
