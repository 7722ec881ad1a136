"""A trainer broadcasts by nccl over a group of its own; a rank on another GPU receives."""

# pyright: reportUnknownVariableType=false
# The stubs of safetensors leave parameters untyped.

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rolloutbus.bus.weights.manifest import DTYPES
from rolloutbus.bus.wire.errors import PeerLost
from rolloutbus.bus.wire.messages.weights import TensorForm
from rolloutbus.trainer_adapter.joined_group.member import JoinedGroup
from rolloutbus.trainer_adapter.joined_group.orders import Invitation
from rolloutbus.trainer_adapter.joined_group.tensor_set import TensorSet, plan_of
from rolloutbus.trainer_adapter.publisher.tensor_source import DTYPE_NAMES
from tests.integration.trainer_group import GROUP, rank_0
from tests.line_process import DEADLINE_S

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")


async def test_buckets_come_whole_and_a_dead_trainer_ends_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    sent = {
        "flag": torch.randint(0, 255, (3,), dtype=torch.uint8, generator=chance),
        "wide": torch.randn(1000, 513, generator=chance),
        "half": torch.randn(4, 7, generator=chance).to(torch.bfloat16),
    }
    forms = [TensorForm(name, DTYPE_NAMES[x.dtype], tuple(x.shape)) for name, x in sent.items()]
    assert {each.dtype for each in forms} <= DTYPES.keys()
    file = tmp_path / "sent.safetensors"
    save_file(sent, file)
    over = asyncio.Event()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    async with rank_0(backend="nccl") as trainer:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        invitation = Invitation(GROUP, "127.0.0.1", trainer.port, 1, 2, "nccl", DEADLINE_S)
        group = await JoinedGroup.join(invitation, lambda _: over.set())
        await trainer.said()
        for packed_bytes in (None, 0):
            plan = plan_of(forms, packed_bytes)
            trainer.order(file, [*sent], packed=packed_bytes is not None)
            received = TensorSet(forms)
            received.add(plan.placed, await group.receive(plan.order, DEADLINE_S))
            got = dict(received.tensors())
            assert all(torch.equal(got[name], each) for name, each in sent.items())
            assert (await trainer.said())["problem"] == ""
        trainer.order(file, [*sent], then="die")
        with pytest.raises(PeerLost, match="is over"):
            await group.receive(plan_of(forms, None).order, DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        await over.wait()
    await group.end("the test is over")
