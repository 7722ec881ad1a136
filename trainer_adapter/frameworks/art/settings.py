"""What a user of the backend chooses, checked before anything starts."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.launcher.settings import EngineKind

WeightSyncMethod = Literal["lora", "disk", "restart"]
SERVER_ENVIRONMENT = ".venv-sglang-server"
"""Environment of the engine that is taken if it is in the working directory, and none is named."""
TIMEOUT_VARIABLE = "ART_SERVER_TIMEOUT"
"""Environment variable that replaces `SGLangConfig.server_timeout`, seconds."""
MEM_FRACTION = 0.9


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Which GPUs sample and which one trains: others (split mode) or the same (shared mode)."""

    inference_device: int = 0
    """First GPU of the engines; `tensor_parallel_size` of them for each worker."""
    training_devices: Sequence[int] = (1,)
    """The GPU that trains: one."""
    auto_detect: bool = True
    """Choose by the GPUs that are there instead: two or more are split, one is shared. Without a
    GPU both are the CPU, and the engine stays up as in split mode."""

    @property
    def is_shared(self) -> bool:
        """Trainer and engine take turns."""
        return self.inference_device in self.training_devices

    def resolved(self, n_gpus: int, n_inference: int) -> "DeviceConfig":
        """The devices themselves, on a machine with `n_gpus` of which engines take `n_inference`.

        Raises:
            SettingsError: they are not there, or are more than can be used.
        """
        if self.auto_detect:
            is_split = n_gpus != 1
            trains_on = n_inference if is_split else 0
            found = DeviceConfig(training_devices=[trains_on], auto_detect=False)
            return found.resolved(n_gpus, n_inference)
        if len(self.training_devices) != 1:
            devices = list(self.training_devices)
            raise SettingsError(f"training_devices: {devices}: this trainer uses one device")
        inference = range(self.inference_device, self.inference_device + n_inference)
        last = max(inference[-1], *self.training_devices)
        if n_gpus and not 0 <= last < n_gpus:
            raise SettingsError(f"devices: GPU {last} is not there: this machine has {n_gpus}")
        if not self.is_shared and self.training_devices[0] in inference:
            raise SettingsError(
                f"training_devices: GPU {self.training_devices[0]} is one of the engines', "
                f"{inference[0]} to {inference[-1]}: choose another, or the first to share it"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class SGLangConfig:
    """How the engines run, and how new weights get to them."""

    mem_fraction_static: float = MEM_FRACTION
    """Part of a GPU's memory that SGLang takes for weights and KV cache."""
    disable_radix_cache: bool = False
    """Compute each prompt anew."""
    max_loras_per_batch: int = 4
    """Steps that stay loaded and may be sampled from side by side, the newest included."""
    context_length: int | None = None
    """Prompt and new tokens of one request; None: what the model was built for."""
    weight_sync_method: WeightSyncMethod = "lora"
    """`lora`: each step is an adapter; older ones stay loaded. `disk`: each step is a version of
    all weights, the adapter merged into them. `restart`: the same, by engines that start anew."""
    flush_cache_on_sync: bool = False
    """False: a step's cache never serves another one, so there is nothing to flush."""
    server_timeout: float = 120.0
    """Until the engines serve, seconds."""
    tensor_parallel_size: int = 1
    """GPUs of one engine."""

    def __post_init__(self) -> None:
        if self.weight_sync_method not in get_args(WeightSyncMethod):
            known = ", ".join(get_args(WeightSyncMethod))
            raise SettingsError(
                f"weight_sync_method: {self.weight_sync_method!r} is not one of {known}"
            )
        if self.flush_cache_on_sync:
            raise SettingsError(
                "flush_cache_on_sync: no prompt finds the cache of other weights than its own; "
                "leave it False"
            )
        for name in ("max_loras_per_batch", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}: {getattr(self, name)} is not at least 1")
        if not 0 < self.mem_fraction_static < 1:
            raise SettingsError(f"mem_fraction_static: {self.mem_fraction_static} is no part of 1")
        _check_seconds("server_timeout", self.server_timeout)

    @property
    def start_timeout_s(self) -> float:
        """`server_timeout`, or what the environment says instead.

        Raises:
            SettingsError: that is no number of seconds.
        """
        given = os.environ.get(TIMEOUT_VARIABLE)
        if given is None:
            return self.server_timeout
        try:
            value = float(given)
        except ValueError:
            value = math.nan
        return _check_seconds(TIMEOUT_VARIABLE, value)


@dataclass(frozen=True, kw_only=True)
class BackendSettings:
    """All that a backend was told."""

    devices: DeviceConfig
    """As resolved for this machine."""
    has_gpu: bool
    config: SGLangConfig
    engine: EngineKind
    engine_python: str | os.PathLike[str]
    workers: int
    engine_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """More options of the engine, see `rolloutbus.up`; they win."""

    def __post_init__(self) -> None:
        if self.engine == "fake":
            raise SettingsError("engine: the fake one has no weights that a trainer could change")
        if self.engine != "sglang":
            alone = {"mem_fraction_static": MEM_FRACTION, "tensor_parallel_size": 1}
            for name, default in alone.items():
                if getattr(self.config, name) != default:
                    raise SettingsError(f"{name}: the {self.engine} engine has no such thing")
            if self.has_gpu and self.devices.inference_device:
                raise SettingsError(
                    f"inference_device: the {self.engine} engine takes the first GPU that it sees; "
                    "say 0, and choose it with CUDA_VISIBLE_DEVICES"
                )

    @property
    def training_device(self) -> str:
        """As torch names it."""
        return f"cuda:{self.devices.training_devices[0]}" if self.has_gpu else "cpu"

    @property
    def python(self) -> str | os.PathLike[str]:
        """Interpreter or environment of the engines; empty: this one."""
        if not self.engine_python and self.engine == "sglang" and Path(SERVER_ENVIRONMENT).is_dir():
            return SERVER_ENVIRONMENT
        return self.engine_python

    def options_of_engine(self, rank: int, modules: Sequence[str]) -> dict[str, Any]:
        """The engine's options, for adapters of this rank on these modules."""
        config = self.config
        options: dict[str, Any] = {"max_context": config.context_length or 0}
        if self.engine == "transformers":
            options["prefix_cache"] = not config.disable_radix_cache
        if self.engine == "sglang":
            options |= {"text": True, "arguments": self._arguments(rank, modules)}
        for name, value in self.engine_options.items():
            is_inner = name == "arguments" and name in options
            options[name] = {**options[name], **value} if is_inner else value
        return options

    def _arguments(self, rank: int, modules: Sequence[str]) -> dict[str, Any]:
        """SGLang's own."""
        config = self.config
        arguments: dict[str, Any] = {
            "mem_fraction_static": config.mem_fraction_static,
            "disable_radix_cache": config.disable_radix_cache,
            "tp_size": config.tensor_parallel_size,
        }
        if self.has_gpu:
            arguments["base_gpu_id"] = self.devices.inference_device
        if config.weight_sync_method == "lora":
            arguments |= {
                "enable_lora": True,
                "max_lora_rank": rank,
                "lora_target_modules": list(modules),
                "max_loras_per_batch": config.max_loras_per_batch,
                "max_loaded_loras": config.max_loras_per_batch + 1,  # room for the next one
            }
        if self.devices.is_shared:
            arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        return arguments


_TAKEN: Mapping[str, tuple[str, ...] | None] = {
    "init_args": ("max_seq_length",),
    "peft_args": (
        *("r", "lora_alpha", "target_modules", "lora_dropout", "use_rslora"),
        *("init_lora_weights", "random_state", "use_gradient_checkpointing"),
    ),
    "trainer_args": (
        *("adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm"),
    ),
    "trainer_gpu_ids": None,
    "inference_gpu_ids": None,
    "rollout_weights_mode": None,
    "chat_template_kwargs": None,
    "chat_template_tool_schema_format": None,
    "allow_unvalidated_arch": None,
}
"""Parts of a model's `_internal_config` that mean something here, and their fields; None: all."""


PEFT_DEFAULTS: Mapping[str, Any] = {
    "r": 8,
    "lora_alpha": 16,
    "random_state": 3407,
    "target_modules": [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ],
    "use_gradient_checkpointing": True,
}
"""ART's, of a model that is not a mixture of experts."""
TRAINER_DEFAULTS: Mapping[str, float] = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.1,
    "max_grad_norm": 0.1,
}
"""ART's."""


def check_internal_config(config: Mapping[str, Any], method: WeightSyncMethod) -> None:
    """SettingsError for what ART's trainer or vLLM would do, and this backend would not."""
    for part, value in config.items():
        if part not in _TAKEN:
            raise SettingsError(f"_internal_config: {part} means nothing to this backend")
        fields = _TAKEN[part]
        for name in () if fields is None else sorted(set(value) - set(fields)):
            raise SettingsError(
                f"_internal_config: {part}.{name} means nothing to this backend; of {part} it "
                f"takes {', '.join(fields or ())}"
            )
    mode = config.get("rollout_weights_mode")
    if mode is not None and (mode == "lora") != (method == "lora"):
        raise SettingsError(
            f"_internal_config: rollout_weights_mode {mode!r} and weight_sync_method {method!r} "
            "contradict each other: merged weights go by disk or restart"
        )


def devices_of(config: Mapping[str, Any], devices: DeviceConfig) -> DeviceConfig:
    """The same, or what a model's `_internal_config` says of them.

    Raises:
        SettingsError: both say something, and not the same.
    """
    trainer, inference = config.get("trainer_gpu_ids"), config.get("inference_gpu_ids")
    if trainer is None and inference is None:
        return devices
    if not trainer or not inference or len(inference) != 1:
        raise SettingsError(
            "_internal_config: trainer_gpu_ids and inference_gpu_ids go together; the second "
            "names the engine's first GPU"
        )
    said = DeviceConfig(
        inference_device=inference[0], training_devices=list(trainer), auto_detect=False
    )
    is_same = replace(devices, training_devices=list(devices.training_devices)) == said
    if not devices.auto_detect and not is_same:
        raise SettingsError(
            f"_internal_config: GPUs {inference} and {trainer} are not those of the backend's "
            f"DeviceConfig, [{devices.inference_device}] and {list(devices.training_devices)}"
        )
    return said


def _check_seconds(name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise SettingsError(f"{name}: a number of seconds above 0 is needed, not {value}")
    return value
