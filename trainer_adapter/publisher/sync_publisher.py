"""Publishing weights from a plain script: `WeightPublisher`, blocking."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import Annotated, TypeVar, Unpack

import torch

from rolloutbus.bus.strict_calls import Described, strict
from rolloutbus.trainer_adapter.client.blocking import LoopThread, Twin, at_once, blocking
from rolloutbus.trainer_adapter.client.sync_client import SyncRolloutClient
from rolloutbus.trainer_adapter.publisher.publisher import (
    Publishable,
    PublisherUpdate,
    Source,
    WeightPublisher,
    give_up_sources,
    source_of,
)
from rolloutbus.trainer_adapter.publisher.tensor_source import Layout, Rename, Tensors
from rolloutbus.trainer_adapter.publisher.transfer import (
    UPDATE_DEADLINE_S,
    Published,
    PublishedLora,
    PublishOptions,
    TransferProgress,
    WeightTransferHandle,
)
from rolloutbus.trainer_adapter.publisher.weight_writer import WeightCheck

ResultT = TypeVar("ResultT")

_CLIENT = "a SyncRolloutClient, of connect_sync(); WeightPublisher takes one of connect()"


@strict()
class SyncWeightTransfer(Twin[WeightTransferHandle]):
    """A version that is published in the background; see `WeightTransferHandle`."""

    @property
    def progress(self) -> TransferProgress:
        """How far it has come."""
        return self.original.progress

    @property
    def is_done(self) -> bool:
        """Whether it has been committed, or failed."""
        return self.original.is_done

    def result(self) -> Published:
        """Wait until it is committed; an interrupt ends the waiting, not the transfer."""
        return self.loop.wait(_result(self.original))

    copied = blocking(WeightTransferHandle.copied)
    changes = blocking(WeightTransferHandle.changes)
    cancel = blocking(WeightTransferHandle.cancel)
    stop = at_once(WeightTransferHandle.stop)


@strict(options=WeightPublisher.publish, refused=give_up_sources)
class SyncPublisherUpdate(Twin[PublisherUpdate]):
    """One version under way; see `PublisherUpdate`."""

    def __init__(self, original: PublisherUpdate, loop: LoopThread, rename: Rename | None) -> None:
        super().__init__(original, loop)
        self._rename = rename

    @property
    def version(self) -> int:
        """0 until `put_all` or `seal`."""
        return self.original.version

    @property
    def published(self) -> Published | None:
        """Set when the `with` block has ended well."""
        return self.original.published

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor into the store; see `PublisherUpdate.put`."""
        if tensor.is_cuda:  # the loop's thread has another stream
            torch.cuda.current_stream(tensor.device).synchronize()
        self.loop.wait(self.original.put(name, tensor))

    def put_all(self, tensors: Publishable, *, layout: Layout | None = None) -> int:
        """Copy all tensors into the store; see `PublisherUpdate.put_all`."""
        source = source_of(tensors, self._rename, layout)
        return _waited(self.loop, self.original.put_all, source)

    seal = blocking(PublisherUpdate.seal)


@strict(options=WeightPublisher.publish, refused=give_up_sources)
class SyncWeightPublisher(Twin[WeightPublisher]):
    """Publishes versions of one policy; see `WeightPublisher`."""

    def __init__(
        self,
        client: Annotated[SyncRolloutClient, Described(_CLIENT)],
        policy: str = "default",
        *,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
        check: WeightCheck = "finite",
    ) -> None:
        """See `WeightPublisher`."""
        publisher = WeightPublisher(
            client.async_client, policy, dtype=dtype, rename=rename, check=check
        )
        super().__init__(publisher, client.loop)
        self._rename = rename

    @property
    def policy(self) -> str:
        """Name of the policy that the weights belong to."""
        return self.original.policy

    # A source takes note of what its thread has asked of the GPU: it is made in the caller's.

    def publish(
        self,
        tensors: Publishable,
        *,
        layout: Layout | None = None,
        **options: Unpack[PublishOptions],
    ) -> Published:
        """Bring these weights to every worker of the policy; see `WeightPublisher.publish`."""
        source = source_of(tensors, self._rename, layout)
        return _waited(self.loop, partial(self.original.publish, **options), source)

    def start(
        self,
        tensors: Publishable,
        *,
        layout: Layout | None = None,
        **options: Unpack[PublishOptions],
    ) -> SyncWeightTransfer:
        """The same in the background; see `WeightPublisher.start`."""
        source = source_of(tensors, self._rename, layout)
        handle = _waited(self.loop, partial(_started, self.original, options), source)
        return SyncWeightTransfer(handle, self.loop)

    @contextmanager
    def begin(
        self, *, layout: Layout | None = None, **options: Unpack[PublishOptions]
    ) -> Generator[SyncPublisherUpdate]:
        """An update in steps, published at the end of the block; see `WeightPublisher.begin`."""
        block = self.original.begin(layout=layout, **options)
        update = self.loop.wait(_entered(block))
        try:
            yield SyncPublisherUpdate(update, self.loop, self._rename)
        except BaseException as error:
            self.loop.wait(_left(block, error))
            raise
        self.loop.wait(_left(block, None))

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
        if torch.cuda.is_initialized():  # the loop's thread has another stream
            torch.cuda.current_stream().synchronize()
        publishing = self.original.publish_lora(
            name,
            tensors,
            alpha=alpha,
            use_rslora=use_rslora,
            allow_zeros=allow_zeros,
            deadline_s=deadline_s,
        )
        return self.loop.wait(publishing)

    restore = blocking(WeightPublisher.restore)
    outcome = blocking(WeightPublisher.outcome)
    offer = at_once(WeightPublisher.offer)
    forget = at_once(WeightPublisher.forget)


def _waited(
    loop: LoopThread, read: Callable[[Source], Awaitable[ResultT]], source: Source
) -> ResultT:
    """Waits on the loop for what reads the source; gives the source up if that never began.

    A client that was closed has no loop, and an interrupt may come before the first step.
    """
    unread = [source]

    async def reading() -> ResultT:
        try:
            taken = unread.pop()
        except IndexError:  # given up by the thread that waited, in the same moment
            raise asyncio.CancelledError from None
        return await read(taken)

    try:
        return loop.wait(reading())
    except BaseException:
        with contextlib.suppress(IndexError):  # whoever reads it gives it up
            unread.pop().give_up()
        raise


async def _started(
    publisher: WeightPublisher, options: PublishOptions, source: Source
) -> WeightTransferHandle:
    return publisher.start(source, **options)


async def _entered(block: AbstractAsyncContextManager[PublisherUpdate]) -> PublisherUpdate:
    return await block.__aenter__()


async def _left(
    block: AbstractAsyncContextManager[PublisherUpdate], error: BaseException | None
) -> None:
    await block.__aexit__(None if error is None else type(error), error, None)


async def _result(handle: WeightTransferHandle) -> Published:
    return await handle
