"""What callers may rely on of an SGLang engine, and what it can do; found by looking."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from rolloutbus.engine_worker.engine import EngineFacts
from rolloutbus.engine_worker.engines.sglang.devices import Devices
from rolloutbus.engine_worker.engines.sglang.guard import Abilities
from rolloutbus.engine_worker.engines.sglang.settings import SglangSettings
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.types import SglangHandle

RANKS = ("tp", "pp", "dp", "ep")


def facts_of(
    engine: SglangHandle,
    settings: SglangSettings,
    arguments: Mapping[str, Any],
    features: frozenset[str],
) -> EngineFacts:
    """Of an engine that was started.

    Args:
        engine: SGLang's.
        settings: the operator's.
        arguments: SGLang's own, as they came out in the end.
        features: what a `generate` may ask for.
    """
    info = upstream.scheduler_info(engine)
    model = engine.tokenizer_manager.model_config
    return EngineFacts(
        kind="sglang",
        vocab_size=model.vocab_size,
        max_context=_max_context(info, int(arguments["page_size"])),
        slots=settings.slots,
        eos_token_ids=tuple(sorted(model.hf_eos_token_id or ())),
        gpus=Devices(arguments).uuids,
        features=features,
        parallel={rank: int(arguments[f"{rank}_size"]) for rank in RANKS},
        software={
            "sglang": upstream.version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
    )


def _max_context(info: Mapping[str, Any], page_size: int) -> int:
    """Prompt + new tokens that SGLang never cuts short, also of a request that is resumed.

    It does so without a word when it thinks that a request may not fit, and refuses input that
    comes within a few tokens of the context's end.
    """
    return min(info["max_req_input_len"], info["max_total_num_tokens"] - 2 * page_size)


def abilities_of(arguments: Mapping[str, Any]) -> Abilities:
    """What an engine with these arguments, as they came out in the end, lets be done with it."""
    return Abilities(
        keeps_weights=bool(arguments.get("enable_weights_cpu_backup")),
        flushes_queued=upstream.flushes_beside_a_queue(),
        has_stages=int(arguments["pp_size"]) > 1,
        shares_weights=arguments.get("weight_cache_mode", "off") not in ("off", None),
        mixes_versions=bool(arguments.get("hicache_storage_backend"))
        and not upstream.stores_by_namespace(),
    )
