"""The processes of `benchmarks.relay_tree`: the trainer on one host, the receivers on the other.

Each gets commands as lines of JSON on standard input, and answers each with one line.
"""

import asyncio
import json
import secrets
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from rolloutbus import RolloutClient
from rolloutbus.bus.actor.ref import STORE
from rolloutbus.bus.actor.resources import keep_freed_memory
from rolloutbus.bus.security.zmq_curve import dialer_of
from rolloutbus.bus.weights.manifest import bytes_of, digest_of, lay_out
from rolloutbus.bus.weights.shm import SegmentWriter
from rolloutbus.bus.wire.errors import RequestError
from rolloutbus.bus.wire.messages.weights import (
    PrepareUpdate,
    Reserved,
    ReserveVersion,
    SealVersion,
    Tensor,
)
from rolloutbus.engine_worker.engine import TensorSpec
from rolloutbus.engine_worker.weights.receiver import WeightReceiver, ways_of_this_host
from rolloutbus.engine_worker.weights.relay import open_relay
from rolloutbus.launcher.plan import FleetKeys
from rolloutbus.trainer_adapter.client.core.results import FleetResult
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings

DEADLINE_S = 120.0
TENSOR_ROWS = 2048
"""A tensor is float32 [2048, 512]: 4 MiB."""


def shapes(n_mib: int) -> list[Tensor]:
    """The model: tensors of 4 MiB, and a scalar so that chunks and tensors do not coincide."""
    names = [("scale", "F32", ()), *((f"layer{i}", "F32", (2048, 512)) for i in range(n_mib // 4))]
    return lay_out(names)


async def run_trainer(router: str, keys: str, link: str, n_mib: int) -> None:
    """Seal a version of random bytes for each `seal`; say what has left by `link` for the rest."""
    security = FleetKeys(Path(keys)).security_of("operator")
    settings = ClientSettings("operator", router, security=security)
    device = Path("/sys/class/net") / link
    writer = SegmentWriter()
    async with RolloutClient(settings) as client:
        _say(ready=True)
        async for line in _lines():
            if line == "seal":
                _say(version=await _seal(client, writer, n_mib))
            else:
                _say(sent=_sent(device))


async def _seal(client: RolloutClient, writer: SegmentWriter, n_mib: int) -> int:
    tensors = shapes(n_mib)
    reserved = await _told(client, ReserveVersion("default", tensors))
    assert isinstance(reserved, Reserved)
    content = writer.content(reserved.segment, reserved.size_bytes)
    content[:] = np.frombuffer(secrets.token_bytes(reserved.size_bytes), np.uint8)
    digests = [digest_of(bytes_of(content, each)) for each in tensors]
    await _told(client, SealVersion("default", reserved.version, digests))
    return reserved.version


async def _told(client: RolloutClient, body: msgspec.Struct) -> object:
    ended = await client.ref(STORE).ask(body, deadline_s=DEADLINE_S)
    assert isinstance(ended, FleetResult)
    (result,) = ended.by_worker.values()
    return result


async def run_receiver(name: str, keys: str, address: str, n_mib: int) -> None:
    """Serve at `address` what was pulled; pull for each `prepare_update` that comes."""
    security = FleetKeys(Path(keys)).security_of(name)
    dialer = dialer_of(security)
    specs = [TensorSpec(t.name, t.dtype, t.shape, t.size_bytes) for t in shapes(n_mib)]
    async with open_relay(f"tcp://{address}:0", security) as relay:
        receiver = WeightReceiver(specs, ways_of_this_host(relay, dialer), dialer, relay)
        _say(bulk=relay.bulk)
        async for line in _lines():
            ask = msgspec.json.decode(line, type=PrepareUpdate)
            began = time.monotonic()
            try:
                prepared = await receiver.prepare(ask, timeout_s=DEADLINE_S)
            except RequestError as error:
                _say(problem=str(error))
                continue
            _say(seconds=time.monotonic() - began, moved_bytes=prepared.moved_bytes)
            receiver.drop(ask.version)  # as if it were active now
        receiver.close()


def _sent(device: Path) -> int:
    return int((device / "statistics/tx_bytes").read_text())


async def _lines() -> AsyncGenerator[str]:
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield line.strip()


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    """`trainer ROUTER KEYS LINK MIB` or `receiver NAME KEYS ADDRESS MIB`."""
    role, first, keys, where, n_mib = sys.argv[1:]
    keep_freed_memory()
    run = run_trainer if role == "trainer" else run_receiver
    uvloop.run(run(first, keys, where, int(n_mib)))


if __name__ == "__main__":
    main()
