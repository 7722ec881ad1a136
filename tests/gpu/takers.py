"""Processes that take weights, and versions to give them."""

# pyright: reportUnknownMemberType=false
# The stubs of torch leave parameters untyped.

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from bus.manifest import digest_of, lay_out, total_bytes
from bus.messages.weights import Manifest, Offer

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0
"""Of every wait; a first use of a GPU takes seconds."""
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64"}


class Version:
    """Random weights of several dtypes on one GPU, about 18 MiB."""

    def __init__(self, number: int, seed: int, device: str = "cuda:0") -> None:
        generator = torch.Generator(device).manual_seed(seed + number)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        self.number = number
        self.tensors = [
            randn(1031, 1027),
            randn(7, 33).bfloat16(),
            randn(1024, 2048).t(),
            torch.tensor(0.5, dtype=torch.float64, device=device),
            randn(0, 4),
            randn(2579, 1031).bfloat16(),
        ]
        self.layout = lay_out(
            (f"t{i}", DTYPES[each.dtype], tuple(each.shape)) for i, each in enumerate(self.tensors)
        )
        raws = [each.contiguous().view(-1).view(torch.uint8) for each in self.tensors]
        self.digests = {
            tensor.name: digest_of(raw.cpu().numpy())
            for tensor, raw in zip(self.layout, raws, strict=True)
        }

    def manifest(self, offers: list[Offer]) -> str:
        """As JSON."""
        tensors = [
            msgspec.structs.replace(each, digest=self.digests[each.name]) for each in self.layout
        ]
        size = total_bytes(self.layout)
        manifest = Manifest("default", self.number, "", "", size, tensors, offers)
        return msgspec.json.encode(manifest).decode()


class TakerProcess:
    """One worker."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def tell(self, do: str, **order: object) -> None:
        """Give an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps({'do': do, **order})}\n".encode())

    async def hear(self) -> dict[str, Any]:
        """The next answer."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            return json.loads(await self.process.stdout.readline())

    async def ask(self, do: str, **order: object) -> dict[str, Any]:
        """Both."""
        self.tell(do, **order)
        return await self.hear()

    async def kill(self) -> None:
        """At once."""
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def takers(transport: str, gpus: list[str]) -> AsyncGenerator[list[TakerProcess]]:
    """One per GPU named, ready; killed at the end."""
    started: list[TakerProcess] = []
    try:
        for gpu in gpus:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "tests.gpu.weight_taker", transport, gpu),
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            started.append(TakerProcess(process))
        for each in started:
            assert await each.hear() == {"ready": True}
        yield started
    finally:
        for each in started:
            if each.process.returncode is None:
                await each.kill()
