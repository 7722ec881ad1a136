"""Workers' receivers in processes of their own, and a store whose bytes are counted."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import torch

from rolloutbus.bus.actor.ref import STORE
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import Bytes, digest_of, lay_out
from rolloutbus.bus.weights.shm import SegmentWriter
from rolloutbus.bus.wire.messages.weights import (
    Manifest,
    PrepareUpdate,
    PullManifest,
    Reserved,
    ReserveVersion,
    SealVersion,
)
from rolloutbus.engine_worker.engine import TensorSpec
from rolloutbus.engine_worker.engines.fake.engine import FAKE_SPECS
from rolloutbus.engine_worker.weights.receiver import WeightReceiver, ways_of_this_host
from rolloutbus.engine_worker.weights.relay import Relay
from rolloutbus.trainer_adapter.client.core.results import FleetResult
from tests.drills.chaos.proxy import Direction, ProxyLink
from tests.integration.live_fleet import DEADLINE_S, START_S
from tests.integration.store_harness import ROOT, StoreHarness, store_harness

Model = dict[str, torch.Tensor]
TENSOR_BYTES = 1 << 20


def model_of(seed: int, n_tensors: int = 32) -> Model:
    """Tensors of 1 MiB, so that each chunk holds four of them; the last ones are odd."""
    generator = torch.Generator().manual_seed(seed)
    rows = TENSOR_BYTES // 4 // 64
    model = {f"t{i:02}": torch.randn(rows, 64, generator=generator) for i in range(n_tensors)}
    model["odd"] = torch.randn(77, generator=generator)
    model["none"] = torch.empty(0)
    return model


def fake_model(seed: int) -> Model:
    """What the fake engine takes."""
    generator = torch.Generator().manual_seed(seed)
    return {each.name: torch.randn(each.shape, generator=generator) for each in FAKE_SPECS}


def bytes_in(model: Model) -> int:
    return sum(each.nbytes for each in model.values())


def digests_of(model: Model) -> dict[str, int]:
    return {
        name: digest_of(np.frombuffer(each.numpy().tobytes(), np.uint8))
        for name, each in model.items()
    }


def specs_of(model: Model) -> list[TensorSpec]:
    return [TensorSpec(name, "F32", tuple(each.shape), each.nbytes) for name, each in model.items()]


async def put(store: StoreHarness, model: Model) -> int:
    """A version with this content, sealed; returns its number."""
    tensors = lay_out((name, "F32", tuple(each.shape)) for name, each in model.items())
    reserved = await _told(store, ReserveVersion("default", tensors))
    assert isinstance(reserved, Reserved)
    content = SegmentWriter().content(reserved.segment, reserved.size_bytes)
    for tensor, each in zip(tensors, model.values(), strict=True):
        raw = np.frombuffer(each.numpy().tobytes(), np.uint8)
        content[tensor.offset : tensor.offset + tensor.size_bytes] = raw
    digests = list(digests_of(model).values())
    await _told(store, SealVersion("default", reserved.version, digests))
    return reserved.version


async def _told(store: StoreHarness, body: msgspec.Struct) -> object:
    ended = await store.ref(STORE).ask(body, deadline_s=DEADLINE_S)
    assert isinstance(ended, FleetResult)
    (result,) = ended.by_worker.values()
    return result


class Node:
    """One receiver with its relay; use as `async with`."""

    def __init__(self, endpoint: str, specs: Sequence[TensorSpec]) -> None:
        self._endpoint = endpoint
        self._specs = specs
        self.bulk = ""

    async def __aenter__(self) -> Self:
        facts = [(each.name, each.dtype, each.shape, each.size_bytes) for each in self._specs]
        rows = json.dumps(facts)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.integration.relay_node", self._endpoint, rows),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        try:
            self.bulk = (await self.hear("bulk", deadline_s=START_S))["bulk"]
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    def tell_prepare(self, ask: PrepareUpdate) -> None:
        """Begin."""
        assert self._process.stdin is not None
        line = json.dumps({"prepare": msgspec.to_builtins(ask)})
        self._process.stdin.write(line.encode() + b"\n")

    async def hear(self, *facts: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """The next line that says one of these facts."""
        assert self._process.stdout is not None
        async with asyncio.timeout(deadline_s):
            while line := await self._process.stdout.readline():
                said: dict[str, Any] = json.loads(line)
                if any(fact in said for fact in facts):
                    return said
        raise AssertionError("the node has ended")

    async def has_proven(self, n_tensors: int) -> None:
        """Wait until so many tensors have been verified."""
        while (await self.hear("proven"))["proven"] < n_tensors:
            pass

    async def outcome(self) -> dict[str, Any]:
        """What came of the last prepare."""
        return await self.hear("digests", "code")

    async def prepare(self, ask: PrepareUpdate) -> dict[str, Any]:
        self.tell_prepare(ask)
        return await self.outcome()

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def leave(self) -> int:
        """Let it end by itself; returns its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(DEADLINE_S):
            return await self._process.wait()


def receiver_of(model: Model, relay: Relay | None = None) -> WeightReceiver:
    return WeightReceiver(specs_of(model), ways_of_this_host(relay), relay=relay)


def digests_staged(receiver: WeightReceiver, version: int) -> dict[str, int]:
    return {name: digest_of(np.asarray(each)) for name, each in receiver.staged(version).items()}


class SlowLane(ProxyLink):
    """Carries so many bytes from the store, and no more."""

    def stop_after(self, n_bytes: int) -> None:
        """Before the first connection."""

        def count(_: Direction, data: bytes) -> bytes:
            if self.carried_bytes["down"] >= n_bytes:
                self.cut("down")
            return data

        self.tamper = count


class Family:
    """A store with one sealed version, behind a proxy that counts, and the receivers below it."""

    def __init__(self, store: StoreHarness, proxy: ProxyLink, version: int, model: Model) -> None:
        self.store = store
        self.proxy = proxy
        self.version = version
        self.model = model

    @property
    def link_bytes(self) -> int:
        """What the store has sent."""
        return self.proxy.carried_bytes["down"]

    def ask(self, *sources: str, bulk: str = "") -> PrepareUpdate:
        """By `tcp`, from these workers and then from the store."""
        store = bulk or self.proxy.endpoint
        return PrepareUpdate("default", self.version, store, "tcp", list(sources))

    async def manifest(self, version: int = 0) -> Manifest:
        """Of the family's version, or of another one."""
        ask = PullManifest("default", version or self.version)
        async with BulkLink(self.store.bulk) as link:
            manifest = await link.ask("pull_manifest", ask)
        assert isinstance(manifest, Manifest)
        return manifest

    async def content(self) -> Bytes:
        """A copy of the version's bytes, uint8 [size_bytes]."""
        manifest = await self.manifest()
        return SegmentWriter().content(manifest.segment, manifest.size_bytes).copy()

    def slow_lane(self) -> "SlowLane":
        """Another way to the store."""
        return SlowLane(self.store.bulk)


@asynccontextmanager
async def family(run_dir: Path, model: Model) -> AsyncGenerator[Family]:
    async with store_harness(run_dir) as store, ProxyLink(store.bulk) as proxy:
        yield Family(store, proxy, await put(store, model), model)


def are_right(outcomes: Sequence[Mapping[str, Any]], model: Model) -> bool:
    return all(each.get("digests") == digests_of(model) for each in outcomes)
