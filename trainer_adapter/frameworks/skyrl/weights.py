"""How SkyRL's policy workers bring weights to a fleet: a strategy of its own weight transfer.

SkyRL's sender hands tensors to a group that its engines have joined. Here rank 0 publishes them: a
version is one transaction for all workers, and no engine has a receiver.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# SkyRL is not installed where types are checked, and leaves much untyped.

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import load_file
from skyrl.backends.skyrl_train import weight_sync
from skyrl.backends.skyrl_train.weight_sync import (
    WeightChunk,
    WeightSyncInitInfo,
    WeightTransferSender,
    WeightTransferStrategy,
)

from rolloutbus.bus.wire.errors import BusError, SettingsError
from rolloutbus.bus.wire.messages.weights import TransportChoice
from rolloutbus.trainer_adapter.frameworks.skyrl.link import FleetOptions, link_of
from rolloutbus.trainer_adapter.publisher.publisher import WeightPublisher, source_of
from rolloutbus.trainer_adapter.publisher.tensor_source import Layout
from rolloutbus.trainer_adapter.publisher.transfer import Published, PublishedLora

ADAPTER = "skyrl-lora"
"""What SkyRL calls the adapter of a run that trains one."""
WAYS: Mapping[str, TransportChoice] = {
    "nccl": "auto",
    "auto": "auto",
    "broadcast": "collective",
    "gloo": "collective",
    "collective": "collective",
    "cuda_ipc": "cuda_ipc",
    "shm": "shm",
    "tcp": "tcp",
    "delta": "delta",
    "disk": "disk",
}
"""Value of `weight_sync_backend` -> transport. SkyRL's `nccl` is CUDA IPC or NCCL, by where the
engines are; `auto` chooses so for each worker."""

Pair = tuple[str, torch.Tensor]
_NO_RECEIVER = "workers fetch a version from the weight store, so there is no receiver to make"


def way_of(weight_sync_backend: str) -> TransportChoice:
    """The transport for a `weight_sync_backend`.

    Raises:
        SettingsError: it is none of `WAYS`.
    """
    if weight_sync_backend not in WAYS:
        raise SettingsError(
            f"generator.inference_engine.weight_sync_backend: {weight_sync_backend!r} is not one "
            f"of {', '.join(WAYS)}"
        )
    return WAYS[weight_sync_backend]


@dataclass
class FleetInitInfo(WeightSyncInitInfo):
    """The parameters of a weight transfer through a fleet, for the sender and the engines."""

    transport: TransportChoice

    @staticmethod
    def strategy_type() -> type[WeightTransferStrategy]:
        """The strategy that it belongs to."""
        return FleetTransferStrategy


class FleetWeightSender(WeightTransferSender):
    """Publishes what SkyRL extracts from the model; every rank has one, the first one publishes."""

    def __init__(self, fleet: FleetOptions, transport: TransportChoice) -> None:
        self._fleet = fleet
        self._transport: TransportChoice = transport
        self._publisher: WeightPublisher | None = None
        self.last_published: Published | None = None
        """Of the first rank."""

    async def send_chunks(
        self,
        chunks: Iterable[WeightChunk],
        weight_metadata: Mapping[str, list[Any]] | None = None,
    ) -> None:
        """Publish a version; called by all ranks, each of which reads its `chunks` to the end.

        Args:
            chunks: whole tensors, which all ranks gather.
            weight_metadata: `names`, `dtype_names` and `shapes` of all of them, in their order.
                Without it they are collected in host memory first.

        Raises:
            BusError: the workers kept the old weights. All ranks raise it.
        """
        pairs = _pairs(chunks)
        problem: BusError | None = None
        if _rank() == 0:
            try:
                self.last_published = await self._publish(pairs, _layout_of(weight_metadata))
            except BusError as error:
                problem = error
        for _ in pairs:  # to gather them takes all ranks, whatever became of the version
            pass
        problem = _shared(problem)
        if problem is not None:
            raise problem

    def teardown(self) -> None:
        """Give back what is kept from one version to the next."""
        if self._publisher is not None:
            link_of(self._fleet).blocking.loop.call(self._publisher.forget)
            self._publisher = None

    async def _publish(self, pairs: Iterator[Pair], layout: Layout | None) -> Published:
        link = link_of(self._fleet)
        if self._publisher is None:
            self._publisher = WeightPublisher(
                link.client, self._fleet.policy, dtype=self._fleet.torch_dtype
            )
        # Made here, where it takes note of this thread's GPU and stream.
        source = source_of((pair for pair in pairs), layout=layout)
        return await link.run(
            self._publisher.publish(
                source,
                transport=self._transport,
                require=self._fleet.require,
                mode=self._fleet.mode,
                deadline_s=self._fleet.deadline_s,
            )
        )


class FleetTransferStrategy(WeightTransferStrategy):
    """Makes the senders; all that SkyRL asks of a strategy."""

    @staticmethod
    def create_init_info(
        ie_cfg: Any,  # noqa: ANN401 - SkyRL's
        inference_world_size: int | None = None,
    ) -> FleetInitInfo:
        """Read `weight_sync_backend`; nothing else depends on the configuration.

        Raises:
            SettingsError: it is none of `WAYS`.
        """
        del inference_world_size  # ranks of engines form no group
        return FleetInitInfo(
            override_existing_receiver=True, transport=way_of(ie_cfg.weight_sync_backend)
        )

    @staticmethod
    def create_sender(
        init_info: FleetInitInfo,
        inference_client: Any,  # noqa: ANN401 - SkyRL's client, or an engine
    ) -> FleetWeightSender:
        """Make the sender of one rank.

        Raises:
            SettingsError: the client has no engine of a fleet.
        """
        engine = getattr(inference_client, "engines", [inference_client])[0]
        fleet = getattr(engine, "fleet", None)
        if not isinstance(fleet, FleetOptions):
            raise SettingsError(
                f"weights go to a fleet, but the engines are {type(engine).__name__}s: make them "
                "with fleet_engines() or fleet_engine()"
            )
        return FleetWeightSender(fleet, init_info.transport)

    @staticmethod
    def create_receiver(init_info: FleetInitInfo) -> NoReturn:
        """Refuse (SkyRL 0.2.0): nothing calls this of an engine of a fleet."""
        del init_info
        raise SettingsError(_NO_RECEIVER)

    @staticmethod
    def get_vllm_transfer_engine() -> NoReturn:
        """Refuse (SkyRL 0.3.0): the same."""
        raise SettingsError(_NO_RECEIVER)


def send_by_fleet() -> None:
    """Have SkyRL's policy workers in this process send weights by `FleetTransferStrategy`.

    Engines call it wherever they are made or unpickled, so that trainers need not.

    Raises:
        SettingsError: this SkyRL has no such place; see the supported versions.
    """
    if not hasattr(weight_sync, "get_transfer_strategy_cls"):
        message = "this SkyRL chooses no transfer strategy where 0.2.0 and 0.3.0 do: install one"
        raise SettingsError(message)
    weight_sync.get_transfer_strategy_cls = _strategy_of


def _strategy_of(weight_sync_backend: str, colocate_all: bool) -> type[WeightTransferStrategy]:  # noqa: FBT001 - SkyRL's
    del colocate_all  # how near a worker is, is seen for each
    way_of(weight_sync_backend)
    return FleetTransferStrategy


async def publish_adapter(fleet: FleetOptions, name: str, directory: str) -> PublishedLora:
    """Bring the adapter in a directory, as SkyRL writes it, to every worker of the policy.

    Raises:
        SettingsError: there is no adapter.
        BusError: as of `WeightPublisher.publish_lora`.
    """
    tensors, config = await asyncio.to_thread(_adapter_in, Path(directory))
    link = link_of(fleet)
    publisher = WeightPublisher(link.client, fleet.policy)
    return await link.run(
        publisher.publish_lora(
            name,
            tensors,
            alpha=float(config["lora_alpha"]),
            use_rslora=bool(config.get("use_rslora")),
            deadline_s=fleet.deadline_s,
        )
    )


def _adapter_in(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    try:
        config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
        return load_file(directory / "adapter_model.safetensors"), config
    except FileNotFoundError as error:
        raise SettingsError(f"no adapter in {directory}: {error.filename} is missing") from error


def _pairs(chunks: Iterable[WeightChunk]) -> Iterator[Pair]:
    for chunk in chunks:
        yield from zip(chunk.names, chunk.tensors, strict=True)


def _layout_of(metadata: Mapping[str, list[Any]] | None) -> Layout | None:
    if metadata is None:
        return None
    columns = zip(metadata["names"], metadata["dtype_names"], metadata["shapes"], strict=True)
    return [(name, getattr(torch, dtype), shape) for name, dtype, shape in columns]


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _shared(problem: BusError | None) -> BusError | None:
    """What the first rank has met; all ranks call this."""
    if not torch.distributed.is_initialized():
        return problem
    told = [problem]
    torch.distributed.broadcast_object_list(told, src=0)
    return told[0]
