"""Buckets of several groups, one policy, and a publication that takes long."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
import torch

from rolloutbus.bus.wire.errors import PeerLost
from rolloutbus.bus.wire.messages.weights import TensorForm
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.joined_group import incoming
from rolloutbus.trainer_adapter.joined_group.orders import (
    Bucket,
    Invitation,
    PublishRules,
    Receive,
)

DEADLINE_S = 20.0
FORMS = [TensorForm("a", "F32", (4,)), TensorForm("b", "F32", (4,))]
RULES = PublishRules("keep")


class QuickGroup:
    """A group whose rank 0 has sent everything already."""

    def __init__(self, invitation: Invitation, on_over: Callable[[str], None]) -> None:
        self.name = invitation.name
        self.problem = ""
        self._on_over = on_over

    @classmethod
    async def join(cls, invitation: Invitation, on_over: Callable[[str], None]) -> "QuickGroup":
        return cls(invitation, on_over)

    async def receive(self, order: Receive, timeout_s: float) -> torch.Tensor:
        del timeout_s
        if self.problem:
            raise PeerLost(f"group {self.name!r} is over: {self.problem}")
        return torch.zeros(order.size_bytes, dtype=torch.uint8)

    async def end(self, why: str) -> None:
        if not self.problem:
            self.problem = why
            self._on_over(why)


class SlowPublisher:
    """Begins to publish, and never ends."""

    def __init__(self, began: asyncio.Event) -> None:
        self._began = began

    @asynccontextmanager
    async def begin(self, **_: object) -> AsyncGenerator[None]:
        self._began.set()
        await asyncio.Event().wait()
        yield

    def forget(self) -> None:
        pass


async def test_a_bucket_whose_asker_leaves_while_another_version_is_published_ends_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = asyncio.Event()

    def publisher(_client: RolloutClient, _policy: str) -> SlowPublisher:
        return SlowPublisher(began)

    monkeypatch.setattr(incoming, "JoinedGroup", QuickGroup)
    monkeypatch.setattr(incoming, "WeightPublisher", publisher)
    weights = incoming.IncomingWeights(cast("RolloutClient", None))
    for name in ("one", "two"):
        invitation = Invitation(name, "127.0.0.1", 1, 1, 2, "gloo", DEADLINE_S)
        await weights.join(invitation, "default", FORMS)
    whole = weights.receive("one", Bucket(FORMS), RULES, DEADLINE_S)
    publishing = asyncio.create_task(whole)
    async with asyncio.timeout(DEADLINE_S):
        await began.wait()
    part = weights.receive("two", Bucket(FORMS[:1]), RULES, DEADLINE_S)
    leaving = asyncio.create_task(part)
    for _ in range(10):  # turns of the loop: it was received then, and waits
        await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    # Without the first tensor, a version could never be completed: its trainer is told.
    with pytest.raises(PeerLost, match="went away before it was added to the version"):
        await weights.receive("two", Bucket(FORMS[1:]), RULES, DEADLINE_S)
