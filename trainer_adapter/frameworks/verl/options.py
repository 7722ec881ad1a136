"""What verl's configuration says of a fleet, and which of its words mean nothing there."""

# pyright: basic, reportMissingImports=false, reportPrivateUsage=false
# verl and Ray are not installed where types are checked.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.workers.config import RolloutConfig

from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.frameworks import fleet

NAME = "rolloutbus"
"""Of the rollout, of the checkpoint engine, and of the part of `engine_kwargs` for both."""
SERVER = f"{NAME}_server_"
"""Begins the names of the replicas' servers, as actors of Ray's; then their replica's number."""

_ONE_RANK = "a replica is a client of the fleet; `rolloutbus up --tp` splits an engine"
_AT_START = "the fleet's engines are given this when `rolloutbus up` starts them"
_REFUSED: Mapping[str, tuple[Any, str]] = {
    "mode": ("async", "verl itself has no other mode any more"),
    "tensor_model_parallel_size": (1, _ONE_RANK),
    "data_parallel_size": (1, _ONE_RANK),
    "pipeline_model_parallel_size": (1, _ONE_RANK),
    "expert_parallel_size": (1, _ONE_RANK),
    "moe_tensor_parallel_size": (1, _ONE_RANK),
    "free_cache_engine": (False, "the fleet's engines have memory of their own and keep it"),
    "full_determinism": (False, "the router places requests by load"),
    "seed": (42, "requests have seeds, engines do not"),
    "logprobs_mode": ("processed_logprobs", "those of what was sampled from are told"),
    "dtype": ("bfloat16", f"what weights are cast to is engine_kwargs.{NAME}.dtype"),
    "gpu_memory_utilization": (0.5, _AT_START),
    "standalone_gpu_memory_utilization": (None, _AT_START),
    "enforce_eager": (False, _AT_START),
    "cudagraph_capture_sizes": (None, _AT_START),
    "max_num_batched_tokens": (8192, _AT_START),
    "scheduling_policy": ("fcfs", _AT_START),
    "enable_chunked_prefill": (True, _AT_START),
    "enable_prefix_caching": (True, _AT_START),
    "load_format": ("dummy", _AT_START),
    "quantization": (None, _AT_START),
    "quantization_config_file": (None, _AT_START),
    "over_sample_rate": (0, "verl's SGLang servers alone have it"),
    "multi_stage_wake_up": (False, "the fleet's engines do not sleep"),
    "enable_sleep_mode": (True, "the fleet's engines do not sleep"),
    "limit_images": (None, "images do not go this way"),
    "layered_summon": (False, "weights are published whole"),
}
"""Words of verl's RolloutConfig that mean nothing here -> the only value, which is verl's default
but for two, and where else to say it."""


@strict()
@dataclass(frozen=True, kw_only=True)
class FleetOptions(fleet.FleetOptions):
    """Where a fleet is: `engine_kwargs.rolloutbus` of the rollout and of the checkpoint engine."""

    dtype: str = "bfloat16"
    """As of the base, but with the dtype in which verl's own engines hold a model."""
    leave_out: Sequence[str] = ()
    """Tensors of the trainer that the engines do not have: `lm_head.weight` of a model that ties it
    to its embeddings."""


def fleet_of(given: Mapping[str, Any] | None) -> FleetOptions:
    """The options in a part of verl's configuration.

    Raises:
        SettingsError: the address is missing, or a name is unknown.
    """
    try:
        return FleetOptions(**(given or {}))
    except TypeError as error:
        names = ", ".join(FleetOptions.__dataclass_fields__)
        raise SettingsError(f"engine_kwargs.{NAME}: {error}; it has {names}") from error


def require_supported(config: RolloutConfig) -> None:
    """Check that each word of verl's configuration means something on a fleet.

    Raises:
        SettingsError: one does not; it says which one, and what to do.
    """
    for name, (only, why) in _REFUSED.items():
        if (value := getattr(config, name)) != only:
            is_default = only == RolloutConfig.__dataclass_fields__[name].default
            instead = "take it out" if is_default else f"say {only!r}"
            raise SettingsError(f"rollout.{name}={value!r}: {why}; {instead}")
    parts = {
        "mtp.enable_rollout": config.mtp is not None
        and config.mtp.enable
        and config.mtp.enable_rollout,
        "qat.enable": bool((config.qat or {}).get("enable")),
        "prometheus.enable": config.prometheus.enable,
        "profiler.enable": config.profiler is not None and config.profiler.enable,
    }
    for name, is_on in parts.items():
        if is_on:
            raise SettingsError(f"rollout.{name}: a replica has no engine; ask the fleet for it")
    for name, given in config.engine_kwargs.items():
        if name != NAME and given:
            raise SettingsError(f"rollout.engine_kwargs.{name}: {_AT_START}")
