"""SkyRL's configuration on a fleet: which engines it asks for, and what its words mean here.

Words that cannot be had are refused by name; so is one that is not known and is not at its default.
"""

# pyright: basic
# SkyRL is not installed where types are checked.

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.messages.control import ServerFacts
from rolloutbus.trainer_adapter.frameworks.skyrl.engine import FleetEngine
from rolloutbus.trainer_adapter.frameworks.skyrl.link import FleetOptions, link_of
from rolloutbus.trainer_adapter.frameworks.skyrl.weights import ADAPTER, way_of
from rolloutbus.trainer_adapter.openai.prompts import ChatTokenizer

_log = logging.getLogger(__name__)

PLACE = "generator.inference_engine"
SIZES: Mapping[str, str] = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "data_parallel_size": "dp",
    "expert_parallel_size": "ep",
}
"""Words that must be what the workers say of themselves."""
AT_START: Mapping[str, str] = {
    "gpu_memory_utilization": "mem_fraction_static",
    "max_num_seqs": "slots",
    "max_num_batched_tokens": "max_prefill_tokens",
    "enable_prefix_caching": "disable_radix_cache",
    "enable_chunked_prefill": "chunked_prefill_size",
    "enforce_eager": "disable_cuda_graph",
    "model_dtype": "dtype",
}
"""Words that a fleet begins with -> what `up_options` makes of them; one that runs has its own."""
NO_MATTER = frozenset(
    {"num_engines", "weight_sync_backend", "served_model_name"}  # mapped by what reads them
    | {"enable_http_endpoint", "http_endpoint_host", "http_endpoint_port"}  # SkyRL's own does it
    | {"weight_transfer_threshold_cuda_ipc_GB", "override_existing_update_group"}
    | {"vllm_v1_disable_multiproc", "distributed_executor_backend", "use_expandable_segments"}
    | {"enable_ray_prometheus_stats"}
)
"""Words about vLLM's processes and SkyRL's own ways to send weights, or that are read elsewhere."""
REFUSED: Mapping[str, str] = {
    "backend": "it names the form of sampling parameters, which is vLLM's: keep 'vllm'",
    "run_engines_locally": "it is for servers by HTTP; keep true, engines are FleetEngines",
    "remote_urls": "FleetOptions.address says where the fleet is",
    "external_proxy_url": "it is for servers by HTTP: there SkyRL's own RemoteInferenceClient goes "
    "through the fleet's gateway, without this adapter",
    "external_server_urls": "the same as external_proxy_url",
    "async_engine": "an engine of a fleet is always asynchronous: keep true",
    "enable_return_routed_experts": "experts are told by the fleet's gateway alone",
    "enable_pd": "workers of a fleet prefill and decode",
    "num_prefill": "workers of a fleet prefill and decode",
    "router_init_kwargs": "they are for vLLM's router; a fleet has its own",
    "engine_init_kwargs": "they are vLLM's; say SGLang's at the start: --sglang.NAME VALUE",
    "speculative_config": "it is said at the start: --sglang.speculative_algorithm and its like",
    "fully_sharded_loras": "it is vLLM's",
    "language_model_only": "SkyRL would prefix the weights' names for vLLM",
}
"""Words that must be at their defaults, and why."""


def fleet_engine(fleet: FleetOptions, cfg: Any, tokenizer: ChatTokenizer) -> FleetEngine:  # noqa: ANN401
    """One engine for the whole fleet: SkyRL's only engine, or what stands in its client's place.

    Args:
        fleet: where it is.
        cfg: a SkyRLTrainConfig.
        tokenizer: of the model.

    Raises:
        SettingsError: the fleet is not what the configuration asks for.
        PeerLost: no router answers.
    """
    _checked(fleet, cfg)
    return FleetEngine(fleet, tokenizer, model_name=_name(cfg), lora=_lora(cfg))


def fleet_engines(fleet: FleetOptions, cfg: Any, tokenizer: ChatTokenizer) -> list[FleetEngine]:  # noqa: ANN401
    """`num_engines` of them, for SkyRL 0.2.0's client: one for the fleet, or one for each worker.

    Arguments and errors as of `fleet_engine`.
    """
    facts = _checked(fleet, cfg)
    if cfg.generator.inference_engine.num_engines == 1:
        return [FleetEngine(fleet, tokenizer, model_name=_name(cfg), lora=_lora(cfg))]
    return [
        FleetEngine(
            fleet,
            tokenizer,
            model_name=_name(cfg),
            worker=worker,
            lora=_lora(cfg),
            brings_adapters=not index,
        )
        for index, worker in enumerate(sorted(facts))
    ]


def up_options(cfg: Any) -> dict[str, Any]:  # noqa: ANN401 - a SkyRLTrainConfig
    """What `rolloutbus.up` is called with for the fleet that a configuration asks for, on SGLang.

    Raises:
        SettingsError: a word cannot be had.
    """
    words = cfg.generator.inference_engine
    _refuse(cfg)
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if getattr(words, name) != 1:
            message = "a worker has one pipeline stage and one replica: take more num_engines"
            raise SettingsError(f"{PLACE}.{name}={getattr(words, name)}: {message}")
    arguments: dict[str, Any] = {
        "tp_size": words.tensor_parallel_size,
        "ep_size": words.expert_parallel_size,
        "mem_fraction_static": words.gpu_memory_utilization,
        "max_prefill_tokens": words.max_num_batched_tokens,
        "disable_radix_cache": not words.enable_prefix_caching,
        "disable_cuda_graph": words.enforce_eager,
        "random_seed": cfg.trainer.seed,
    }
    if not words.enable_chunked_prefill:
        arguments["chunked_prefill_size"] = -1
    if cfg.trainer.placement.colocate_all:
        arguments["enable_memory_saver"] = True
    if _lora(cfg):
        rank = cfg.trainer.policy.model.lora.rank
        arguments |= {"enable_lora": True, "max_lora_rank": rank, "lora_target_modules": ["all"]}
    return {
        "model": cfg.trainer.policy.model.path,
        "workers": words.num_engines,
        "engine": "sglang",
        "engine_options": {
            "slots": words.max_num_seqs,
            "dtype": words.model_dtype,
            "text": True,  # SkyRL asks for at least one token, which SGLang does with text alone
            "arguments": arguments,
        },
    }


def _checked(fleet: FleetOptions, cfg: Any) -> dict[str, ServerFacts]:  # noqa: ANN401
    """What the workers are, if it is what the configuration asks for."""
    words = cfg.generator.inference_engine
    _refuse(cfg)
    way_of(words.weight_sync_backend)
    link = link_of(fleet)
    facts = link.facts()
    link.end_pause()
    if words.num_engines not in (1, len(facts)):
        raise SettingsError(
            f"{PLACE}.num_engines={words.num_engines}: the fleet has {len(facts)} workers: "
            f"{len(facts)} engines are one for each, 1 is one for all"
        )
    for name, kind in SIZES.items():
        for worker, each in sorted(facts.items()):
            if getattr(words, name) != each.parallel.get(kind, 1):
                raise SettingsError(
                    f"{PLACE}.{name}={getattr(words, name)}: worker {worker} has "
                    f"{kind}={each.parallel.get(kind, 1)}"
                )
    said = [name for name, default in _defaults(words) if getattr(words, name) != default]
    late = sorted(AT_START.keys() & said)
    if late:
        _log.warning("a fleet has these from its start (see up_options): %s", ", ".join(late))
    return facts


def _refuse(cfg: Any) -> None:  # noqa: ANN401
    words = cfg.generator.inference_engine
    known = {*SIZES, *AT_START, *NO_MATTER}
    for name, default in _defaults(words):
        value = getattr(words, name)
        if name not in known and value != default:
            why = REFUSED.get(name, "this adapter does not know the word: leave it at its default")
            raise SettingsError(f"{PLACE}.{name}={value!r}: {why}")
    for name, default in _defaults(cfg.generator):
        if name.startswith("rope_") and getattr(cfg.generator, name) != default:
            message = "engines read it in the model's config.json"
            raise SettingsError(f"generator.{name}={getattr(cfg.generator, name)!r}: {message}")


def _defaults(words: Any) -> list[tuple[str, object]]:  # noqa: ANN401
    """(name, default) of each field."""
    plain = type(words)()
    return [(each.name, getattr(plain, each.name)) for each in dataclasses.fields(words)]


def _name(cfg: Any) -> str:  # noqa: ANN401
    return cfg.generator.inference_engine.served_model_name or cfg.trainer.policy.model.path


def _lora(cfg: Any) -> str:  # noqa: ANN401
    """Name of the adapter that the run trains; empty if it trains the model.

    With Megatron adapters are merged into what is sent, unless it is told not to.
    """
    if cfg.trainer.policy.model.lora.rank <= 0:
        return ""
    if cfg.trainer.strategy == "megatron":
        return "" if cfg.trainer.policy.megatron_config.lora_config.merge_lora else ADAPTER
    return ADAPTER
