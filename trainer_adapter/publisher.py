"""Publishing new weights: reserve, write and seal in the store, then the router's update."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
import torch

from bus.bulk import BulkLink
from bus.errors import DeadlineExceeded, LocalProtocolError, PeerLost
from bus.manifest import lay_out
from bus.messages.endings import Done
from bus.messages.weights import (
    InFlight,
    PublishVersion,
    Reserved,
    ReserveVersion,
    SealVersion,
    Tensor,
)
from bus.messages.weights import Published as PublishedByRouter
from bus.ref import ROUTER, STORE
from bus.security.zmq_dialer import Dialer
from trainer_adapter.control import FleetRef
from trainer_adapter.named_tensors import DTYPE_NAMES, Tensors, named_tensors, published_dtype
from trainer_adapter.rollout import FleetResult
from trainer_adapter.weight_writer import WeightWriter

STORE_TRIES = 3
"""Commands to the store may be repeated; so often when it is lost under way."""

ResultT = TypeVar("ResultT", bound=msgspec.Struct)


class Publishing(Protocol):
    """What a publisher needs of a client."""

    @property
    def bulk(self) -> str:
        """Endpoint of the weight store's bulk socket; empty while there is no store."""
        ...

    @property
    def dialer(self) -> Dialer | None:
        """The keys it connects with, if any."""
        ...

    def ref(self, address: str) -> FleetRef:
        """The router (empty) or the `store`."""
        ...


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is committed: new requests are served with it."""

    version: int
    stall_ms: dict[str, float]
    """Worker -> how long it could not generate because of the swap; active workers only."""
    quarantined: dict[str, str]
    """Worker -> why it is not active; it gets no requests until it has caught up."""
    write_s: float
    """Copying the tensors into the store and verifying them, seconds."""
    update_s: float
    """Bringing them to the workers, from sealed to committed, seconds."""


class Update:
    """One version under way; see `WeightPublisher.begin`."""

    def __init__(self, publisher: "WeightPublisher", deadline_at: float) -> None:
        self._publisher = publisher
        self._deadline_at = deadline_at
        self.version = 0
        """0 until `put_all`."""
        self.write_s = 0.0
        self.published: Published | None = None
        """Set when the `async with` block has ended well."""

    async def put_all(self, tensors: Tensors) -> int:
        """Copy all tensors into the store; afterwards they may change. Returns the version.

        Raises:
            RequestError: the store has no room, or the bytes changed while they were copied.
            DeadlineExceeded: nothing was published.
        """
        if self.version:
            raise LocalProtocolError("an update takes all its tensors in one put_all")
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.left_s):
                self.version = await self._publisher.write(tensors, self)
        except TimeoutError as error:
            raise DeadlineExceeded(
                "writing the weights took too long", outcome="not_started"
            ) from error
        self.write_s = time.monotonic() - began
        return self.version

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least a hundredth."""
        return max(0.01, self._deadline_at - time.monotonic())


class WeightPublisher:
    """Publishes versions of one policy. Updates of one policy go one after another."""

    def __init__(
        self,
        client: Publishing,
        policy: str = "default",
        *,
        dtype: torch.dtype | None = None,
        writer: WeightWriter | None = None,
    ) -> None:
        """`dtype`: what floating-point tensors are cast to on the way; None keeps theirs."""
        self.policy = policy
        self._client = client
        self._dtype = dtype
        self._writer = writer or WeightWriter()
        self._turn = asyncio.Lock()

    async def publish(
        self,
        tensors: Tensors,
        *,
        in_flight: InFlight = "in_place",
        require: str = "any",
        deadline_s: float = 120.0,
    ) -> Published:
        """Bring these weights to every worker of the policy, as one transaction.

        Args:
            tensors: a module (its parameters), a state dict, or (name, tensor) pairs; on any
                device. Tied tensors are sent once, under their first name. They must not change
                until the copy is done; `begin` tells when that is.
            in_flight: what becomes of running requests: `finish_old`, `in_place` (keep the KV
                cache), `retract` (keep tokens, recompute the KV cache) or `abort`.
            require: how many workers must have it staged: `all`, `quorum` or `any`.
            deadline_s: for everything, seconds.

        Raises:
            RequestError: refused or failed: every worker keeps the old weights; see `.code`.
            DeadlineExceeded: unknown; ask `status` for the committed version.
        Spec: docs/protocol.md, "Weights".
        """
        async with self.begin(
            in_flight=in_flight, require=require, deadline_s=deadline_s
        ) as update:
            await update.put_all(tensors)
        assert update.published is not None
        return update.published

    @asynccontextmanager
    async def begin(
        self,
        *,
        in_flight: InFlight = "in_place",
        require: str = "any",
        deadline_s: float = 120.0,
    ) -> AsyncGenerator[Update]:
        """An update in two steps: `await update.put_all(tensors)` inside, published at the end.

        Leaving the block by an error publishes nothing.
        """
        update = Update(self, time.monotonic() + deadline_s)
        async with self._turn:
            yield update
            if not update.version:
                return
            began = time.monotonic()
            body = PublishVersion(
                policy=self.policy, version=update.version, in_flight=in_flight, require=require
            )
            router = self._client.ref(ROUTER)
            result = await router.ask_for(PublishedByRouter, body, deadline_s=update.left_s)
            update.published = _published(result, update.write_s, time.monotonic() - began)

    async def write(self, tensors: Tensors, update: Update) -> int:
        """Reserve, copy and seal a version; only `Update.put_all` calls this."""
        named = named_tensors(tensors)
        dtypes = [published_dtype(tensor, self._dtype) for _, tensor in named]
        layout = lay_out(
            (name, DTYPE_NAMES[dtype], tuple(tensor.shape))
            for (name, tensor), dtype in zip(named, dtypes, strict=True)
        )
        reserved = await self._reserve(layout, update)
        digests = await self._writer.write(
            reserved,
            layout,
            [tensor for _, tensor in named],
            policy=self.policy,
            bulk=BulkLink(self._client.bulk, self._client.dialer),
        )
        seal = SealVersion(policy=self.policy, version=reserved.version, digests=digests)
        await self._ask_store(Done, seal, update)
        return reserved.version

    async def _reserve(self, layout: list[Tensor], update: Update) -> Reserved:
        body = ReserveVersion(policy=self.policy, tensors=layout)
        return await self._ask_store(Reserved, body, update)

    async def _ask_store(
        self, expected: type[ResultT], body: msgspec.Struct, update: Update
    ) -> ResultT:
        store = self._client.ref(STORE)
        n_tries = 1
        while True:
            try:
                result = await store.ask_for(FleetResult, body, deadline_s=update.left_s)
                return result.only(expected)
            except PeerLost:
                if n_tries == STORE_TRIES:
                    raise
                n_tries += 1


def _published(result: PublishedByRouter, write_s: float, update_s: float) -> Published:
    return Published(
        version=result.version,
        stall_ms={each.worker: each.stall_ms for each in result.workers if each.is_active},
        quarantined={each.worker: each.problem for each in result.workers if not each.is_active},
        write_s=write_s,
        update_s=update_s,
    )
