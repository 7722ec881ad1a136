"""Weights from verl: its checkpoint engine and its rollout, by the weight store."""

# pyright: basic, reportMissingImports=false, reportPrivateUsage=false
# verl and Ray are not installed where types are checked.

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

import ray
from torch import distributed
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.config import RolloutConfig
from verl.workers.rollout.base import BaseRollout

from rolloutbus.bus.wire.errors import BusError, DeadlineExceeded, SettingsError
from rolloutbus.trainer_adapter.client.client import connect
from rolloutbus.trainer_adapter.frameworks.fleet import GatheredWeights, Pair, connected
from rolloutbus.trainer_adapter.frameworks.verl.options import (
    NAME,
    SERVER,
    FleetOptions,
    fleet_of,
)
from rolloutbus.trainer_adapter.publisher.transfer import Published

POLL_S = 0.02
"""Between two looks at what the workers attest."""


class WeightSender:
    """Publishes what the ranks of a trainer gather: one transaction for all workers."""

    def __init__(self, fleet: FleetOptions) -> None:
        self._fleet = fleet
        self._weights: GatheredWeights | None = None

    async def send(self, weights: Iterable[Pair], global_steps: int | None) -> Published:
        """Publish; called by all ranks, each of which gets the result or the error.

        All servers are told which of verl's steps the version is of.

        Raises:
            BusError: as of `GatheredWeights.publish`. The workers have the older version still.
        """
        published = await asyncio.to_thread(self._send, weights)
        if distributed.get_rank() == 0:
            names = [each for each in ray.util.list_named_actors() if each.startswith(SERVER)]
            servers = [ray.get_actor(each) for each in names]
            told = (
                each.set_global_steps.remote(global_steps, published.version) for each in servers
            )
            await asyncio.gather(*told)
        return published

    def _send(self, weights: Iterable[Pair]) -> Published:
        outcome: list[Published | BusError | None] = [None]
        tensors = iter(weights)
        if distributed.get_rank() == 0:
            try:
                outcome = [self._publish(tensors)]
            except BusError as error:
                outcome = [error]
        for _ in tensors:  # to gather them takes all ranks, also when it failed
            pass
        distributed.broadcast_object_list(outcome, src=0)
        if isinstance(outcome[0], BusError):
            raise outcome[0]
        assert outcome[0] is not None
        return outcome[0]

    def _name_of(self, name: str) -> str | None:
        return None if name in self._fleet.leave_out else name

    def _publish(self, tensors: Iterator[Pair]) -> Published:
        if self._weights is None:
            client = connected(self._fleet)
            self._weights = GatheredWeights(client, self._fleet, rename=self._name_of)
        return self._weights.publish(tensors)


@CheckpointEngineRegistry.register(NAME)
class FleetCheckpointEngine(CheckpointEngine):
    """`checkpoint_engine.backend=rolloutbus`: the trainer publishes, and replicas hear of it.

    The bytes go from the trainer to the weight store and from there to the workers. What a replica
    receives is the number of the version, once all workers that serve attest that they have it.
    """

    wire_format = "attested_version"

    def __init__(self, bucket_size: int, *, is_master: bool = False, **fleet: Any) -> None:  # noqa: ANN401
        """Made by verl, on both sides; `fleet` are FleetOptions.

        Raises:
            SettingsError: they are not.
        """
        del bucket_size, is_master  # the publisher fuses tensors itself; the first rank publishes
        self._fleet = fleet_of(fleet)
        self._sender = WeightSender(self._fleet)
        self._receivers: list[Any] = []
        self._told: asyncio.Queue[Published | BusError] = asyncio.Queue()

    def prepare(self) -> dict[str, Any]:
        """Name this process to the other side."""
        return {"process": ray.get_runtime_context().current_actor}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Have the trainer's first rank know the processes of the replicas."""
        receivers = [each["process"] for each in metadata[actor_wg_world_size:]]
        nobody: list[Any] = []
        return (
            {"receivers": [receivers, *[nobody] * (actor_wg_world_size - 1)]},
            {"receivers": [nobody] * rollout_world_size},
        )

    def init_process_group(self, receivers: list[Any]) -> None:
        """Begin an update."""
        self._receivers = receivers
        self._told = asyncio.Queue()

    def finalize(self) -> None:
        """End an update."""
        self._receivers = []

    async def send_weights(
        self, weights: Iterable[Pair], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish, on every rank of the trainer; returns what verl adds to a step's metrics.

        Raises:
            BusError: as of `WeightPublisher.publish`, here and in the replicas.
        """
        try:
            outcome = await self._sender.send(weights, global_steps)
        except BusError as error:
            outcome = error
        for each in self._receivers:
            await each.execute_checkpoint_engine.remote("published", outcome)
        if isinstance(outcome, BusError):
            raise outcome
        return {
            "fleet/version": outcome.version,
            "fleet/write_s": outcome.write_s,
            "fleet/update_s": outcome.update_s,
            "fleet/stall_ms": max(outcome.stall_ms.values(), default=0.0),
        }

    def published(self, outcome: Published | BusError) -> None:
        """Told by the trainer: what became of the update."""
        self._told.put_nowait(outcome)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[int]:
        """Yields the version that the trainer has published, once the workers attest it.

        Raises:
            BusError: the trainer's.
            DeadlineExceeded: the trainer is silent, or a worker does not attest it.
        """
        del global_steps
        try:
            async with asyncio.timeout(self._fleet.deadline_s):
                outcome = await self._told.get()
                if isinstance(outcome, BusError):
                    raise outcome
                await self._attested(outcome.version)
        except TimeoutError as error:
            message = f"no new version on all workers within {self._fleet.deadline_s:g} s"
            raise DeadlineExceeded(message) from error
        yield outcome.version

    async def _attested(self, version: int) -> None:
        """Wait until no worker that gets requests has an older version."""
        fleet = self._fleet
        async with connect(fleet.address, key_file=fleet.key_file) as client:
            while True:
                workers = (await client.status()).workers
                serving = [each for each in workers if each.policy == fleet.policy]
                serving = [each for each in serving if not each.blocked_by]
                if serving and all(each.version >= version for each in serving):
                    return
                await asyncio.sleep(POLL_S)


class FleetRollout(BaseRollout):
    """What verl updates the weights of: in a replica's process, or in the trainer's (hybrid)."""

    def __init__(
        self,
        config: RolloutConfig,
        model_config: Any,  # noqa: ANN401 - verl's
        device_mesh: object = None,
        replica_rank: int = -1,
    ) -> None:
        """Arguments as of verl's own; the replica of a trainer's rank has its number."""
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank if replica_rank >= 0 else int(os.environ["RANK"])
        self.is_leader_rank = True
        self._sender = WeightSender(fleet_of(self.config.engine_kwargs.get(NAME)))

    async def update_weights(
        self,
        weights: Any,  # noqa: ANN401 - as `wire_format` says
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: object = None,
        base_sync_done: bool = True,
    ) -> None:
        """Publish tensors, by all ranks together; or wait until workers attest what was published.

        Raises:
            SettingsError: what comes are no weights, but adapters, or of another checkpoint engine.
            BusError: as of `WeightSender.send` and `FleetCheckpointEngine.receive_weights`.
        """
        del base_sync_done  # of adapters
        if peft_config is not None:
            raise SettingsError("model.lora.merge=False: say True; adapters are merged on the way")
        if wire_format == FleetCheckpointEngine.wire_format:
            async for _version in weights:
                pass
        elif wire_format == "named_tensors":
            await self._sender.send(weights, global_steps)
        else:
            raise SettingsError(f"checkpoint_engine.backend: say {NAME}; {wire_format} cannot be")

    async def resume(self, tags: list[str]) -> None:
        """Nothing, nor does `release`: the fleet's engines keep their memory."""

    async def release(self) -> None:
        """Nothing."""
