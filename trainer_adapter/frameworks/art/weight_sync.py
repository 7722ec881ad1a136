"""How a step's weights get to the engines: `SGLangConfig.weight_sync_method`.

Each way has names of its own for ART's `MODEL@STEP`, of which none can mean the weights of another
step: an adapter that is only ever that step's, a version with that number, or engines that serve
nothing else.
"""

import logging
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

from rolloutbus.bus.wire.errors import BusError, OutcomeUnknown, PeerLost, SettingsError
from rolloutbus.launcher.fleet import Fleet, up
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.trainer_adapter.client.client import RolloutClient, connect
from rolloutbus.trainer_adapter.frameworks.art.settings import WeightSyncMethod
from rolloutbus.trainer_adapter.frameworks.art.trainer import LoraTrainer
from rolloutbus.trainer_adapter.publisher.publisher import WeightPublisher

_log = logging.getLogger(__name__)

N_TRIES = 3
"""Of an update that fails, before ART is told."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
CHAT_DEFAULTS: Mapping[str, Any] = {"logprobs": True, "return_tokens_as_token_ids": True}
"""ART trains on what its server tells of each token, whether a rollout asked for it or not."""


def check_name(name: str) -> None:
    """SettingsError unless a model may be called so: its steps have names on the bus."""
    if _NAME.fullmatch(name) is None or name == "default":
        raise SettingsError(
            f"name: {name[:64]!r} cannot be a model's here: 1 to 32 of A-Z a-z 0-9 _ -, "
            "and not 'default'"
        )


class ServedFleet:
    """A fleet and its gateway, which can be taken down and brought up at the same port."""

    def __init__(self, options: UpOptions, port: int, http_options: Mapping[str, Any]) -> None:
        self._options = options
        self._http = {**http_options, "chat_defaults": dict(CHAT_DEFAULTS)}
        self._port = port
        self._stack = AsyncExitStack()
        self._fleet: Fleet | None = None
        self._client: RolloutClient | None = None

    @property
    def client(self) -> RolloutClient:
        """A client of it.

        Raises:
            PeerLost: it is not up.
        """
        if self._client is None:
            message = "the engines are down; close the backend, and register the model again"
            raise PeerLost(message, outcome="not_started")
        return self._client

    @property
    def fleet(self) -> Fleet:
        """The fleet itself."""
        assert self._fleet is not None, "it was started"
        return self._fleet

    async def start(self, served_name: str, **options: Any) -> None:  # noqa: ANN401 - of `up`
        """Bring it up.

        Args:
            served_name: what requests may call the policy `default`.
            **options: of `rolloutbus.up`, for this time.

        Raises:
            As of `rolloutbus.up`.
        """
        http = {**self._http, "served_model_name": served_name}
        asked: Any = {**self._options, "http": self._port, "http_options": http, **options}
        async with AsyncExitStack() as stack:
            self._fleet = await stack.enter_async_context(up(**asked))
            connecting = connect(self._fleet.address, name="art", key_file=self._fleet.key_file)
            self._client = await stack.enter_async_context(connecting)
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """Take it down. Idempotent."""
        self._client = self._fleet = None
        await self._stack.aclose()


class WeightSync(Protocol):
    """One of the ways."""

    async def start(self, step: int) -> None:
        """Bring the engines up with the trainer's present weights as this step."""
        ...

    async def serve(self, step: int) -> None:
        """From now on this step can be sampled from. If it fails, the one before still can."""
        ...

    async def retain(self, steps: set[int]) -> None:
        """Of the older steps only these are wanted."""
        ...


class AdapterSync:
    """`lora`: each step is an adapter of its own, `MODEL-STEP` on the bus."""

    def __init__(
        self, served: ServedFleet, trainer: LoraTrainer, model: str, base: str, n_kept: int
    ) -> None:
        self._served = served
        self._trainer = trainer
        self._model = model
        self._base = base
        self._n_kept = n_kept
        self._loaded: list[int] = []
        """Steps, oldest first."""

    async def start(self, step: int) -> None:
        """See `WeightSync`."""
        await self._served.start(self._base)
        self._publisher = WeightPublisher(self._served.client)
        await self.serve(step)

    async def serve(self, step: int) -> None:
        """See `WeightSync`."""
        await _tried(lambda: self._publish(step))
        self._loaded.append(step)
        while len(self._loaded) > self._n_kept:
            await self._unload(self._loaded[0])

    async def retain(self, steps: set[int]) -> None:
        """See `WeightSync`."""
        for step in [each for each in self._loaded[:-1] if each not in steps]:
            await self._unload(step)

    async def _publish(self, step: int) -> None:
        published = await self._publisher.publish_lora(
            self._adapter_name(step),
            self._trainer.model,
            alpha=self._trainer.alpha,
            use_rslora=self._trainer.uses_rslora,
            allow_zeros=True,  # a new adapter changes nothing yet
        )
        for error in published.problems.values():
            raise error

    async def _unload(self, step: int) -> None:
        self._loaded.remove(step)
        try:
            await self._served.client.unload_lora(self._adapter_name(step))
        except BusError as error:  # the new step is served all the same
            _log.warning("step %d stays loaded somewhere: %s", step, error)

    def _adapter_name(self, step: int) -> str:
        return f"{self._model}-{step}"


class VersionSync:
    """`disk`: each step is a version of all weights, with the step's number."""

    def __init__(self, served: ServedFleet, trainer: LoraTrainer, model: str) -> None:
        self._served = served
        self._trainer = trainer
        self._model = model

    async def start(self, step: int) -> None:
        """See `WeightSync`. Step 0 is the base model, which the engines have."""
        await self._served.start(self._model)
        self._publisher = WeightPublisher(self._served.client)
        if step:
            await self.serve(step)

    async def serve(self, step: int) -> None:
        """See `WeightSync`."""
        try:
            await self._publisher.publish(self._trainer.merged(), require="all", version=step)
        except OutcomeUnknown as error:
            if await self._publisher.outcome(error.version) != "committed":
                raise

    async def retain(self, steps: set[int]) -> None:
        """See `WeightSync`. Engines have one version at a time."""


class RestartSync:
    """`restart`: engines that start anew serve a model's directory, and nothing else."""

    def __init__(
        self, served: ServedFleet, trainer: LoraTrainer, model: str, directory: Path
    ) -> None:
        self._served = served
        self._trainer = trainer
        self._model = model
        self._directory = directory

    async def start(self, step: int) -> None:
        """See `WeightSync`."""
        await self.serve(step)

    async def serve(self, step: int) -> None:
        """See `WeightSync`. Nothing can be sampled from until the engines are there again."""
        at = self._directory / f"{step:04d}"
        self._trainer.save_merged(str(at))
        await self._served.stop()
        await self._served.start(f"{self._model}@{step}", model=at)
        for older in self._directory.iterdir():
            if older != at:
                shutil.rmtree(older)

    async def retain(self, steps: set[int]) -> None:
        """See `WeightSync`. Engines have one step at a time."""


def weight_sync(
    method: WeightSyncMethod,
    served: ServedFleet,
    trainer: LoraTrainer,
    *,
    model: str,
    base: str,
    output_dir: str,
    n_kept: int,
) -> WeightSync:
    """The way that is called so.

    Args:
        method: its name.
        served: the fleet, not up yet.
        trainer: whose weights they are.
        model: ART's name of it.
        base: what requests may call the model without what was learned.
        output_dir: ART's directory of the model.
        n_kept: steps that stay loaded, of adapters.
    """
    match method:
        case "lora":
            return AdapterSync(served, trainer, model, base, n_kept)
        case "disk":
            return VersionSync(served, trainer, model)
        case "restart":
            return RestartSync(served, trainer, model, Path(output_dir) / "serving")


async def _tried(update: Callable[[], Awaitable[None]]) -> None:
    """Try an update that may be repeated several times."""
    for n_failed in range(1, N_TRIES + 1):
        try:
            return await update()
        except BusError as error:
            if n_failed == N_TRIES:
                raise
            _log.warning("update %d of %d failed: %s", n_failed, N_TRIES, error)
    return None
