"""ART's local backend, with the engines of a fleet instead of vLLM."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIncompatibleMethodOverride=false
# ART is not installed where types are checked.

import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from art import Model, TrainableModel
from art.local.adapter_leases import pinned_inference_step
from art.local.backend import LocalBackend
from art.utils.output_dirs import get_model_dir

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.launcher.settings import EngineKind
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.frameworks.art.service import FleetService
from rolloutbus.trainer_adapter.frameworks.art.settings import (
    BackendSettings,
    DeviceConfig,
    SGLangConfig,
    check_internal_config,
    devices_of,
)
from rolloutbus.trainer_adapter.frameworks.art.weight_sync import check_name


class SGLangBackend(LocalBackend):
    """Trains in this process; samples on a fleet of its own, through a gateway.

    `async with` it, or `await backend.close()`: then the engines end.
    """

    def __init__(
        self,
        *,
        inference_device: int | None = None,
        training_devices: Sequence[int] | None = None,
        device_config: DeviceConfig | None = None,
        sglang_config: SGLangConfig | None = None,
        engine: EngineKind = "sglang",
        engine_python: str | os.PathLike[str] = "",
        engine_options: Mapping[str, Any] | None = None,
        workers: int = 1,
        path: str | None = None,
        gpu_cost_per_hour_usd: float | None = None,
    ) -> None:
        """Nothing starts before a model is registered.

        Args:
            inference_device: first GPU of the engines.
            training_devices: the GPU that trains; the same one: they take turns.
            device_config: both, instead; none: by the GPUs that are there.
            sglang_config: how engines run, and how weights get to them.
            engine: `sglang`, or `transformers`, which needs no GPU.
            engine_python: interpreter or environment of the engines; empty: `.venv-sglang-server`
                if it is here and they are SGLang's, else this one.
            engine_options: more options of the engine, as of `rolloutbus.up`.
            workers: engines.
            path: directory of checkpoints and logs, as of `LocalBackend`.
            gpu_cost_per_hour_usd: as of `LocalBackend`.

        Raises:
            SettingsError: an option has no valid value here.
        """
        named = {"inference_device": inference_device, "training_devices": training_devices}
        said: dict[str, Any] = {name: each for name, each in named.items() if each is not None}
        if said and device_config is not None:
            raise SettingsError(f"{', '.join(said)} and device_config: say one of them")
        if said:
            device_config = DeviceConfig(auto_detect=False, **said)
        self._device_config = device_config or DeviceConfig()
        self._sglang_config = sglang_config or SGLangConfig()
        self._engine: EngineKind = engine
        self._engine_python = engine_python
        self._engine_options = dict(engine_options or {})
        self._workers = workers
        self._settings(self._device_config)  # what is wrong is told now
        super().__init__(in_process=True, path=path, gpu_cost_per_hour_usd=gpu_cost_per_hour_usd)

    def __enter__(self) -> NoReturn:
        raise SettingsError("engines end with `async with`, or with `await backend.close()`")

    async def register(self, model: Model) -> None:
        """Register a model; `model.register(backend)` then starts its trainer and its engines.

        Raises:
            SettingsError: its name, or a part of its `_internal_config`, means nothing here.
        """
        if isinstance(model, TrainableModel):
            check_name(model.name)
            if model.base_model == model.name:
                raise SettingsError(f"name: {model.name!r} is the base model's; choose another one")
            config: dict[str, Any] = dict(model._internal_config or {})  # noqa: SLF001 - as ART does
            check_internal_config(config, self._sglang_config.weight_sync_method)
            devices = self._settings(devices_of(config, self._device_config)).devices
            if not devices.is_shared:
                # How ART, and its PipelineTrainer, know that sampling goes on while it trains.
                config["trainer_gpu_ids"] = list(devices.training_devices)
                config["inference_gpu_ids"] = [devices.inference_device]
                object.__setattr__(model, "_internal_config", config)
        await super().register(model)

    def _train_sft(self, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401 - ART's
        raise SettingsError(
            "train_sft: ART prepares its texts by Unsloth, which this backend does without; "
            "train supervised with art.LocalBackend, and go on here from its checkpoints"
        )

    def client_of(self, model: TrainableModel) -> RolloutClient:
        """The bus's client of a registered model's fleet, for what HTTP does not tell."""
        service = cast("FleetService | None", self._services.get(model.name))
        if service is None:
            raise SettingsError(f"model {model.name!r} is not registered with this backend")
        return service.client

    def _settings(self, devices: DeviceConfig) -> BackendSettings:
        n_gpus = torch.cuda.device_count()
        n_inference = self._workers * self._sglang_config.tensor_parallel_size
        return BackendSettings(
            devices=devices.resolved(n_gpus, n_inference),
            has_gpu=n_gpus > 0,
            config=self._sglang_config,
            engine=self._engine,
            engine_python=self._engine_python,
            workers=self._workers,
            engine_options=self._engine_options,
        )

    async def _get_service(self, model: TrainableModel) -> Any:  # noqa: ANN401 - ART's
        if model.name not in self._services:
            given: Any = model._internal_config or {}  # noqa: SLF001 - as ART does
            self._services[model.name] = FleetService(
                model_name=model.name,
                base_model=model.base_model,
                config=given,
                output_dir=get_model_dir(model=model, art_path=self._path),
                settings=self._settings(devices_of(given, self._device_config)),
            )
        return self._services[model.name]

    def _model_inference_name(self, model: Model, step: int | None = None) -> str:
        """ART's `MODEL@STEP`; without a step, of the newest that the engines have."""
        service = cast("FleetService | None", self._services.get(model.name))
        if step is None and service is not None and pinned_inference_step(model.name) is None:
            step = service.latest_step
        return super()._model_inference_name(model, step)
