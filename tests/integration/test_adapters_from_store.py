"""An adapter in the weight store comes to an engine in PEFT's terms, verified."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from rolloutbus.bus.actor.ref import STORE
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.weights.manifest import Bytes, digest_of
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.control import Adapters, LoadLora
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import (
    PushChunk,
    Reserved,
    ReserveVersion,
    SealVersion,
    Tensor,
)
from rolloutbus.engine_worker.engine import LoraTensors, TensorSpec
from rolloutbus.engine_worker.host.commands import HostCommands
from rolloutbus.engine_worker.weights.adapter_sources import CONFIG
from rolloutbus.trainer_adapter.client.core.results import FleetResult
from tests.capable_engine import CapableEngine
from tests.integration.live_fleet import DEADLINE_S
from tests.integration.store_harness import StoreHarness, store_harness

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

POLICY = "main"
LORA_A = "base_model.model.q_proj.lora_A.weight"
A = np.arange(6, dtype=np.float32).view(np.uint8)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[StoreHarness]:
    async with store_harness(tmp_path) as harness:
        yield harness


@pytest.fixture
def engine() -> Iterator[CapableEngine]:
    engine = CapableEngine()
    yield engine
    engine.close()


def _raw(text: str) -> Bytes:
    return np.frombuffer(text.encode(), np.uint8)


async def seal(store: StoreHarness, policy: str, parts: Mapping[str, tuple[str, Bytes]]) -> int:
    """Write a version of (dtype, bytes) by name; which one it became."""
    tensors: list[Tensor] = []
    offset = 0
    for name, (dtype, raw) in parts.items():
        shape = (2, 3) if dtype == "F32" else (len(raw),)
        tensors.append(Tensor(name, dtype, shape, offset, len(raw)))
        offset += len(raw)

    async def ask(body: ReserveVersion | SealVersion) -> FleetResult:
        return await store.ref(STORE).ask_for(FleetResult, body, deadline_s=DEADLINE_S)

    version = (await ask(ReserveVersion(policy, tensors))).only(Reserved).version
    async with BulkLink(store.bulk) as bulk:
        for tensor, (_, raw) in zip(tensors, parts.values(), strict=True):
            chunk = PushChunk(policy, version, tensor.offset, raw.tobytes())
            await bulk.ask("push_chunk", chunk)
    digests = [digest_of(raw) for _, raw in parts.values()]
    (await ask(SealVersion(policy, version, digests))).check()
    return version


async def load(engine: CapableEngine, ask: LoadLora) -> tuple[str, object]:
    commands = HostCommands(engine, DEADLINE_S, policy=POLICY)
    return await commands.carry_out(Entry("load_lora", "c/1", body=pack(ask)))


async def test_an_adapter_is_pulled_with_its_configuration(
    store: StoreHarness, engine: CapableEngine
) -> None:
    config = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    parts = {LORA_A: ("F32", A), CONFIG: ("U8", _raw(json.dumps(config)))}
    version = await seal(store, f"{POLICY}.judge", parts)
    ended = await load(engine, LoadLora("judge", version, bulk=store.bulk))
    assert ended == ("finished", Adapters({"judge": version}))
    (source,) = engine.lora.sources
    assert isinstance(source, LoraTensors)
    assert source.config == config
    assert source.specs == [TensorSpec(LORA_A, "F32", (2, 3), 24)]
    assert {name: np.asarray(raw).tolist() for name, raw in source.tensors.items()} == {
        LORA_A: A.tolist()
    }


@pytest.mark.parametrize("config", [None, "", "[1]", "{"])
async def test_a_version_without_a_configuration_is_no_adapter(
    store: StoreHarness, engine: CapableEngine, config: str | None
) -> None:
    parts = {LORA_A: ("F32", A)}
    if config:
        parts[CONFIG] = ("U8", _raw(config))
    version = await seal(store, f"{POLICY}.judge", parts)
    ended, problem = await load(engine, LoadLora("judge", version, bulk=store.bulk))
    assert ended == "failed"
    assert isinstance(problem, Problem)
    assert (problem.code, problem.field) == ("bad_request", "version")
    assert engine.lora.sources == []


@pytest.mark.parametrize(
    "bulk",
    ["nonsense", "tcp://127.0.0.1:x", "http://a.b/", "ipc://", "#"],
)
async def test_what_is_no_address_is_refused(engine: CapableEngine, bulk: str) -> None:
    ended, problem = await load(engine, LoadLora("judge", 1, bulk=bulk))
    assert ended == "failed"
    assert isinstance(problem, Problem)
    assert (problem.code, problem.field) == ("bad_request", "bulk")


async def test_a_store_that_is_gone_is_not_waited_for(
    engine: CapableEngine, tmp_path: Path
) -> None:
    ended, problem = await load(engine, LoadLora("judge", 1, bulk=f"ipc://{tmp_path}/gone"))
    assert ended == "failed"
    assert isinstance(problem, Problem)
    assert problem.code == "no_store"


async def test_a_version_that_the_store_does_not_have_fails(
    store: StoreHarness, engine: CapableEngine
) -> None:
    ended, problem = await load(engine, LoadLora("judge", 9, bulk=store.bulk))
    assert ended == "failed"
    assert isinstance(problem, Problem)
    assert problem.code != "engine_failed"
    assert engine.lora.sources == []
