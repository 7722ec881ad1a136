"""Publishing weights from a plain script: `WeightPublisher`, blocking."""

from collections.abc import Generator
from typing import Annotated

import torch

from rolloutbus.bus.strict_calls import Described, strict
from rolloutbus.bus.wire.messages.weights import InFlight, TransportChoice, UpdateMode
from rolloutbus.trainer_adapter.client.sync_control import SyncFleetClient
from rolloutbus.trainer_adapter.publisher.lora import PublishedLora
from rolloutbus.trainer_adapter.publisher.named_tensors import Rename, Tensors
from rolloutbus.trainer_adapter.publisher.publication import UpdateOutcome
from rolloutbus.trainer_adapter.publisher.published import (
    UPDATE_DEADLINE_S,
    Published,
    PublishOptions,
    Requirement,
)
from rolloutbus.trainer_adapter.publisher.publisher import (
    Publishable,
    WeightPublisher,
    give_up_sources,
    source_of,
)
from rolloutbus.trainer_adapter.publisher.soundness import WeightCheck
from rolloutbus.trainer_adapter.publisher.tensor_source import Layout
from rolloutbus.trainer_adapter.publisher.transfer import TransferProgress, WeightTransferHandle

_CLIENT = "a SyncRolloutClient, of connect_sync(); WeightPublisher takes one of connect()"


@strict()
class SyncWeightTransfer:
    """A version that is published in the background; see `WeightTransferHandle`."""

    def __init__(self, client: SyncFleetClient, handle: WeightTransferHandle) -> None:
        self._client = client
        self._handle = handle

    @property
    def progress(self) -> TransferProgress:
        """How far it has come."""
        return self._handle.progress

    @property
    def is_done(self) -> bool:
        """Whether it has been committed, or failed."""
        return self._handle.is_done

    def copied(self) -> None:
        """Wait until the tensors may change: the next training step may run."""
        self._client.run(self._handle.copied())

    def changes(self) -> Generator[TransferProgress]:
        """The progress now and after each change, until its end; a slow reader misses some."""
        changes = self._handle.changes()
        try:
            while (progress := self._client.run(anext(changes, None))) is not None:
                yield progress
        finally:
            self._client.run(changes.aclose())

    def cancel(self) -> bool:
        """End it if that is still possible; False: too late, it is committed."""
        return self._client.run(self._handle.cancel())

    def result(self) -> Published:
        """Wait until it is committed; an interrupt ends the waiting, not the transfer."""
        return self._client.run(_result(self._handle))


@strict(refused=give_up_sources)
class SyncWeightPublisher:
    """Publishes versions of one policy; see `WeightPublisher`."""

    def __init__(
        self,
        client: Annotated[SyncFleetClient, Described(_CLIENT)],
        policy: str = "default",
        *,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
        check: WeightCheck = "finite",
    ) -> None:
        """See `WeightPublisher`."""
        self._client = client
        self._rename = rename
        self._publisher = WeightPublisher(client.async_client, policy, dtype=dtype, check=check)

    def publish(
        self,
        tensors: Publishable,
        *,
        layout: Layout | None = None,
        in_flight: InFlight = "keep",
        require: Requirement = "any",
        transport: TransportChoice = "auto",
        mode: UpdateMode = "staged",
        floor: int = 0,
        allow_zeros: bool = False,
        deadline_s: float = UPDATE_DEADLINE_S,
    ) -> Published:
        """Bring these weights to every worker of the policy; see `WeightPublisher.publish`."""
        source = source_of(tensors, self._rename, layout)
        publishing = self._publisher.publish(
            source,
            in_flight=in_flight,
            require=require,
            transport=transport,
            mode=mode,
            floor=floor,
            allow_zeros=allow_zeros,
            deadline_s=deadline_s,
        )
        return self._client.run(publishing)

    def start(
        self,
        tensors: Publishable,
        *,
        layout: Layout | None = None,
        in_flight: InFlight = "keep",
        require: Requirement = "any",
        transport: TransportChoice = "auto",
        mode: UpdateMode = "staged",
        floor: int = 0,
        allow_zeros: bool = False,
        deadline_s: float = UPDATE_DEADLINE_S,
    ) -> SyncWeightTransfer:
        """The same in the background; see `WeightPublisher.start`."""
        options = PublishOptions(
            in_flight=in_flight,
            require=require,
            transport=transport,
            mode=mode,
            floor=floor,
            allow_zeros=allow_zeros,
            deadline_s=deadline_s,
        )
        # Made here: it takes note of what this thread has asked of its GPU.
        source = source_of(tensors, self._rename, layout)
        handle = self._client.run(_start(self._publisher, source, options))
        return SyncWeightTransfer(self._client, handle)

    def publish_lora(
        self,
        name: str,
        tensors: Tensors,
        *,
        alpha: float,
        use_rslora: bool = False,
        allow_zeros: bool = False,
        deadline_s: float = UPDATE_DEADLINE_S,
    ) -> PublishedLora:
        """Bring a low-rank adapter to every worker; see `WeightPublisher.publish_lora`."""
        publishing = self._publisher.publish_lora(
            name,
            tensors,
            alpha=alpha,
            use_rslora=use_rslora,
            allow_zeros=allow_zeros,
            deadline_s=deadline_s,
        )
        return self._client.run(publishing)

    def restore(
        self,
        version: int,
        *,
        in_flight: InFlight = "keep",
        require: Requirement = "any",
        transport: TransportChoice = "auto",
        mode: UpdateMode = "staged",
        floor: int = 0,
        deadline_s: float = UPDATE_DEADLINE_S,
    ) -> Published:
        """Publish the content of an old version again; see `WeightPublisher.restore`."""
        restoring = self._publisher.restore(
            version,
            in_flight=in_flight,
            require=require,
            transport=transport,
            mode=mode,
            floor=floor,
            deadline_s=deadline_s,
        )
        return self._client.run(restoring)

    def outcome(self, version: int = 0, *, deadline_s: float = 30.0) -> UpdateOutcome:
        """What became of a version; see `WeightPublisher.outcome`."""
        return self._client.run(self._publisher.outcome(version, deadline_s=deadline_s))

    def forget(self) -> None:
        """Give back the memory that is kept from one version to the next."""
        self._client.run(_forget(self._publisher))


async def _start(
    publisher: WeightPublisher, source: Publishable, options: PublishOptions
) -> WeightTransferHandle:
    return publisher.start(source, **options)


async def _result(handle: WeightTransferHandle) -> Published:
    return await handle


async def _forget(publisher: WeightPublisher) -> None:
    publisher.forget()
