"""A trainer that makes a group of its own, has a gateway join it, and broadcasts weights there."""

import asyncio
import json
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from rolloutbus.launcher.plan import environment
from tests.integration.gateway_process import Gateway, Json, Reply
from tests.integration.live_fleet import START_S

GROUP = "weight_update_group"
"""The name of a group that says none."""
JOIN, RECEIVE, LEAVE = (
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/destroy_weights_update_group",
)


@dataclass(frozen=True)
class Trainer:
    """Rank 0, and what it does at the gateway."""

    process: asyncio.subprocess.Process
    port: int
    group: str

    def invitation(self, **fields: object) -> Json:
        """Body of `/init_weights_update_group`."""
        body: Json = {"master_address": "127.0.0.1", "master_port": self.port}
        body |= {"rank_offset": 1, "world_size": 2, "backend": "gloo", "group_name": self.group}
        return body | fields

    async def said(self) -> Json:
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            return json.loads(await self.process.stdout.readline())

    def order(self, file: Path, names: Sequence[str], **fields: object) -> None:
        """Have it broadcast."""
        assert self.process.stdin is not None
        line = json.dumps({"file": str(file), "names": [*names], **fields})
        self.process.stdin.write(f"{line}\n".encode())

    async def send(
        self, served: Gateway, file: Path, tensors: Mapping[str, torch.Tensor], **fields: object
    ) -> tuple[Reply, Json]:
        """A bucket: the request and the broadcasts; what both sides say."""
        is_packed = fields.get("load_format") == "flattened_bucket"
        self.order(file, [*tensors], packed=is_packed)
        reply = await served.ask("POST", RECEIVE, self.bucket(tensors) | fields)
        return reply, await self.said()

    def bucket(self, tensors: Mapping[str, torch.Tensor]) -> Json:
        """Body of `/update_weights_from_distributed`."""
        return {
            "names": [*tensors],
            "dtypes": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
            "shapes": [list(each.shape) for each in tensors.values()],
            "group_name": self.group,
            "timeout": START_S,
        }


@asynccontextmanager
async def rank_0(
    group: str = GROUP, world: int = 2, backend: str = "gloo"
) -> AsyncGenerator[Trainer]:
    """A trainer's rank 0, which waits for the others."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = int(bound.getsockname()[1])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.integration.group_trainer"),
            *(str(bound.fileno()), str(world), group, backend),
            stdin=PIPE,
            stdout=PIPE,
            pass_fds=[bound.fileno()],
            env=environment() | {"TORCH_CPP_LOG_LEVEL": "FATAL"},
        )
    try:
        yield Trainer(process, port, group)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def joined(served: Gateway, group: str = GROUP) -> AsyncGenerator[Trainer]:
    """One whose group the gateway is in."""
    async with rank_0(group) as trainer:
        try:
            reply = await served.ask("POST", JOIN, trainer.invitation())
            assert (reply.status, reply.json["success"]) == (200, True), reply.json
            assert (await trainer.said())["joined"]
            yield trainer
        finally:  # a place that was not taken in time is in the way of the next one, too
            await served.ask("POST", LEAVE, {"group_name": group})
