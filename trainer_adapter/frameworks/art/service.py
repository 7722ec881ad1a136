"""ART's service of one model: a trainer in this process, engines in a fleet."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# ART is not installed where types are checked.

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from art import dev
from art.local.checkpoints import get_last_checkpoint_dir
from art.preprocessing.pack import DiskPackedTensors
from art.types import TrainConfig
from art.utils.get_model_step import get_step_from_dir
from art.utils.output_dirs import get_step_checkpoint_dir

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.frameworks.art.settings import BackendSettings
from rolloutbus.trainer_adapter.frameworks.art.trainer import LoraTrainer
from rolloutbus.trainer_adapter.frameworks.art.weight_sync import (
    ServedFleet,
    WeightSync,
    weight_sync,
)

DRAIN_S = 600.0
"""Within which requests under way end before the engines sleep, seconds."""
MEMORY = ("weights", "kv_cache")


class FleetService:
    """What ART calls a `ModelService`, but for supervised training; see the backend."""

    def __init__(
        self,
        model_name: str,
        base_model: str,
        config: dev.InternalModelConfig,
        output_dir: str,
        settings: BackendSettings,
    ) -> None:
        """Nothing starts yet.

        Args:
            model_name: of the trainable model.
            base_model: directory or name of what it begins as.
            config: the model's `_internal_config`.
            output_dir: where ART keeps what belongs to the model.
            settings: of the backend.
        """
        self._model_name = model_name
        self._base_model = base_model
        self._config = config
        self._output_dir = output_dir
        self._settings = settings
        self._trainer: Any = None
        self._served: ServedFleet | None = None
        self._sync: WeightSync | None = None
        self._is_sleeping = False
        self.latest_step = 0
        """The newest step that can be sampled from."""

    async def start_openai_server(self, config: dev.OpenAIServerConfig | None) -> tuple[str, int]:
        """Load the trainer, bring the engines up; returns the gateway's host and port.

        Raises:
            SettingsError: an option means nothing here.
            As of `rolloutbus.up`.
        """
        port, formats = _server_options(config or {})
        step = get_step_from_dir(self._output_dir)
        checkpoint = get_last_checkpoint_dir(self._output_dir)
        self._trainer = LoraTrainer(
            self._base_model, checkpoint, self._config, self._settings.training_device
        )
        if checkpoint is None:
            self._trainer.save(get_step_checkpoint_dir(self._output_dir, 0))
        if self._settings.devices.is_shared:
            self._trainer.move(is_aside=True)
        sglang = self._settings.config
        self._served = ServedFleet(self._up_options(), port, formats)
        self._sync = weight_sync(
            sglang.weight_sync_method,
            self._served,
            self._trainer,
            model=self._model_name,
            base=self._base_model,
            output_dir=self._output_dir,
            n_kept=sglang.max_loras_per_batch,
        )
        try:
            await self._sync.start(step)
        except BaseException:
            await self.aclose()
            raise
        self.latest_step = step
        address = urlsplit(self._served.fleet.http)
        assert address.hostname is not None
        assert address.port is not None
        return address.hostname, address.port

    @property
    def client(self) -> RolloutClient:
        """Of the fleet."""
        assert self._served is not None, "ART starts the server first"
        return self._served.client

    async def vllm_engine_is_sleeping(self) -> bool:
        """Whether the engines sleep while the trainer works."""
        return self._is_sleeping

    async def train(
        self,
        disk_packed_tensors: DiskPackedTensors,
        config: TrainConfig,
        _config: dev.TrainConfig,
        verbose: bool = False,  # noqa: FBT001, FBT002 - ART's
    ) -> AsyncIterator[dict[str, float]]:
        """Train a step, save it, and have the engines serve it."""
        del verbose
        async with self._training():
            async for metrics in self._trainer.train(disk_packed_tensors, config, _config):
                yield metrics

    async def register_lora_for_step(self, step: int, checkpoint_dir: str) -> None:
        """Serve the present weights as another step: there was nothing to train on."""
        del checkpoint_dir  # it is a copy of the last one
        await self._serve(step)

    async def prune_loaded_adapters(self, *, retain_steps: set[int]) -> None:
        """Forget older steps that ART does not want any more."""
        assert self._sync is not None, "ART starts the server first"
        await self._sync.retain(retain_steps)

    async def aclose(self) -> None:
        """Take the engines down. Idempotent."""
        if self._served is not None:
            await self._served.stop()

    @asynccontextmanager
    async def _training(self) -> AsyncGenerator[None]:
        """The trainer works inside; at the end the engines serve what has come of it.

        If it fails they go on with the step that they had.
        """
        if not self._settings.devices.is_shared:
            yield
            step = self._saved()
        else:
            async with self._alone():
                yield
                step = self._saved()
        await self._serve(step)

    @asynccontextmanager
    async def _alone(self) -> AsyncGenerator[None]:
        """The engines give their memory to the trainer, and get it back. Requests wait."""
        assert self._served is not None, "ART starts the server first"
        client = self._served.client
        try:
            await client.pause("drain", deadline_s=DRAIN_S)
            try:
                await client.sleep(MEMORY)
                self._is_sleeping = True
                self._trainer.move(is_aside=False)
                yield
            finally:  # also of a trainer that did not find room, or engines that slept in part
                try:
                    self._trainer.move(is_aside=True)
                finally:
                    await client.wake_up(MEMORY)
                    self._is_sleeping = False
        finally:
            await client.resume()

    def _saved(self) -> int:
        """Write a checkpoint of the next step; returns its number."""
        step = get_step_from_dir(self._output_dir) + 1
        self._trainer.save(get_step_checkpoint_dir(self._output_dir, step))
        return step

    async def _serve(self, step: int) -> None:
        assert self._sync is not None, "ART starts the server first"
        await self._sync.serve(step)
        self.latest_step = step

    def _up_options(self) -> UpOptions:
        settings = self._settings
        return {
            "model": self._base_model,
            "workers": settings.workers,
            "engine": settings.engine,
            "engine_options": settings.options_of_engine(self._trainer.rank, self._trainer.modules),
            "python": settings.python,
            "start_timeout_s": settings.config.start_timeout_s,
        }


_FORMATS = {"tool_call_parser": "tool_format", "reasoning_parser": "reasoning_format"}
"""vLLM's word -> the gateway's."""


def _server_options(config: dev.OpenAIServerConfig) -> tuple[int, dict[str, str]]:
    """The port, and more settings of the gateway, of ART's configuration of a vLLM server."""
    server = dict(config.get("server_args", {}))
    port = server.pop("port")
    formats = {ours: server.pop(its) for its, ours in _FORMATS.items() if its in server}
    for name in server:
        raise SettingsError(
            f"server_args.{name}: it is an option of vLLM's server; the gateway takes port, "
            f"{', '.join(_FORMATS)}"
        )
    for name in config.get("engine_args", {}):
        raise SettingsError(
            f"engine_args.{name}: it is an option of vLLM's; say engine_options=… of the backend"
        )
    return port, formats
