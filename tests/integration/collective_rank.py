"""Worker ranks of broadcasts, in a process of their own: one line of JSON in, one out, each."""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from operator import le
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch

from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import digest_of
from rolloutbus.bus.weights.rank_group import KeptGroup
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.weights import Manifest, PrepareUpdate
from rolloutbus.engine_worker.weights.buffers import SpareBuffer
from rolloutbus.engine_worker.weights.staged import CannotFetch
from rolloutbus.engine_worker.weights.transports.broadcast import HostBuffer, WorkerRendezvous
from rolloutbus.engine_worker.weights.transports.buckets import offer_of
from rolloutbus.engine_worker.weights.transports.collective import Collective
from tests.integration.live_fleet import n_held

SETTLE_S = 60.0


class HalfRendezvous(WorkerRendezvous):
    """Receives one bucket, says so, and is not heard of again."""

    def receive(self, pieces: Sequence[torch.Tensor]) -> None:
        super().receive(pieces[:1])
        print(json.dumps({"half": True}), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)


async def take(way: Collective, order: dict[str, Any]) -> dict[str, Any]:
    manifest = msgspec.json.decode(order["manifest"], type=Manifest)
    ask = PrepareUpdate(
        "default", manifest.version, "", "collective", rank=order["rank"], world=order["world"]
    )
    try:
        staged = await way.fetch(ask, manifest, cast("BulkLink", None))
    except (CannotFetch, EngineFailed) as error:
        return {"error": type(error).__name__, "text": str(error)}
    digests = {name: digest_of(np.asarray(each)) for name, each in staged.tensors.items()}
    staged.release()
    return {"digests": digests, "moved_bytes": staged.moved_bytes}


def take_half(order: dict[str, Any]) -> None:
    manifest = msgspec.json.decode(order["manifest"], type=Manifest)
    offer = offer_of(manifest, "collective")
    meeting = HalfRendezvous(offer.at, offer.backend, (order["rank"], order["world"]), KeptGroup())
    landing = HostBuffer(np.empty(manifest.size_bytes, np.uint8), manifest, offer.buckets)
    meeting.join()
    meeting.receive(landing.pieces)


def held_at_rest(before: list[int]) -> list[int]:
    """Descriptors and threads, once there are no more than `before` or that has taken too long."""
    give_up_at = time.monotonic() + SETTLE_S
    while True:
        held = [n_held("fd"), n_held("task")]
        if all(map(le, held, before)) or time.monotonic() > give_up_at:
            return held
        time.sleep(0.01)  # a thread that was joined is listed a moment longer


def sockets() -> list[str]:
    """Those that are open; no two of a host ever have the same name."""
    names: list[str] = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the directory itself, read a moment ago
            names.append(str(each.readlink()))
    return [each for each in names if each.startswith("socket:")]


def main() -> None:
    way = Collective(SpareBuffer())
    held = [sys.maxsize, sys.maxsize]
    print(json.dumps({"ready": torch.distributed.is_available()}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "half":
            take_half(order)
            continue
        report = asyncio.run(take(way, order))
        for each in threading.enumerate():
            if each.name.startswith("rolloutbus"):
                each.join()  # its result was there a moment before its end
        if order.get("must_settle"):
            held = report["held"] = held_at_rest(held)
        report["sockets"] = sockets()
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
