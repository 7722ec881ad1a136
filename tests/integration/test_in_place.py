"""Weights overwritten where they lie: what is torn samples nothing, the next version mends it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.wire.errors import EngineFailed, PeerLost
from rolloutbus.bus.wire.messages.weights import (
    Committed,
    CommitUpdate,
    Manifest,
    PrepareUpdate,
    Transport,
)
from rolloutbus.engine_worker.engine import EngineBusy, InFlight, TensorRange, Work
from rolloutbus.engine_worker.engines.transformers.engine import TransformersEngine
from rolloutbus.engine_worker.weights.in_place import InPlace
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor
from rolloutbus.engine_worker.weights.staged import ask_manifest
from tests.integration.live_fleet import DEADLINE_S
from tests.integration.relay_family import put
from tests.integration.store_harness import StoreHarness, store_harness
from tests.step_log import StepLog, key
from tests.tiny_models import (
    TOLERANCE,
    Build,
    changed,
    check_fresh,
    engines,
    fresh,
    make_model,
    save_models,
    work,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CHUNK_BYTES = 4096
"""Many for the tiny model, and few of them under way at once."""
N_BEFORE = 5
"""Writes before something happens."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def log() -> Iterator[StepLog]:
    with StepLog() as log:
        yield log


@pytest.fixture
def build(log: StepLog, paths: dict[str, Path]) -> Iterator[Build]:
    with engines(log, paths) as build:
        yield build


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[StoreHarness]:
    async with store_harness(tmp_path) as harness:
        yield harness


class Watched:
    """An engine's weights; `on_write` sees each write, and may change it."""

    def __init__(
        self, engine: TransformersEngine, on_write: Callable[[int, RawTensor], RawTensor]
    ) -> None:
        self.begin_overwrite = engine.overwriter.begin_overwrite
        self.overwritten = engine.overwriter.overwritten
        self.end_overwrite = engine.overwriter.end_overwrite
        self._overwrite = engine.overwriter.overwrite
        self._on_write = on_write
        self._n_writes = 0

    def overwrite(self, name: str, offset: int, raw: RawTensor) -> None:
        self._n_writes += 1
        self._overwrite(name, offset, self._on_write(self._n_writes, raw))


async def publish(store: StoreHarness, seed: int) -> tuple[int, Any]:
    """A changed model, sealed in the store: its version, and the model."""
    model = make_model("llama", 0)
    changed(model, seed)
    tensors = {name: each.detach() for name, each in model.named_parameters()}
    return await put(store, tensors), model


async def manifest_of(store: StoreHarness, ask: PrepareUpdate) -> Manifest:
    async with BulkLink(store.bulk) as link:
        return await ask_manifest(link, ask)


async def take(
    in_place: InPlace, store: StoreHarness, version: int, in_flight: InFlight = "keep"
) -> None:
    ask = PrepareUpdate("default", version, store.bulk, "tcp", mode="overwrite")
    in_place.agree(ask, await manifest_of(store, ask))
    await in_place.commit(CommitUpdate("default", version, in_flight), DEADLINE_S)


def check_unreadable(engine: TransformersEngine) -> None:
    """What is torn is of no version, so nobody gets to see it."""
    with pytest.raises(EngineBusy):
        engine.weights.read_ranges([TensorRange("lm_head.weight", 0, 4)])


def check_versions(log: StepLog, job: Work, models: dict[int, Any]) -> None:
    """Each token is of the weights that it says, and all of these were used."""
    emitted = log[job.key[0]]
    tokens = np.concatenate([job.prompt, np.array(emitted.tokens, np.int32)])
    truth = {v: fresh(each, tokens, len(job.prompt)) for v, each in models.items()}
    want = [truth[v][i] for i, v in enumerate(emitted.versions)]
    np.testing.assert_allclose(emitted.logprobs, want, atol=TOLERANCE, rtol=0)
    assert set(emitted.versions) == models.keys()


@pytest.mark.parametrize("in_flight", ["keep", "retract", "abort", "finish_old"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_logprobs_are_true_after_an_update_in_place(
    store: StoreHarness, build: Build, log: StepLog, transport: Transport, in_flight: InFlight
) -> None:
    engine = build()
    version, model = await publish(store, 1)
    ask = PrepareUpdate("default", version, store.bulk, transport, mode="overwrite")
    in_place = InPlace(engine.overwriter)
    prepared = in_place.agree(ask, await manifest_of(store, ask))
    assert prepared.transport == transport
    log.hold(5)
    jobs = [work("a", 60), work("b", 80)]
    engine.generate(jobs)
    body = CommitUpdate("default", version, in_flight)

    def update() -> Committed:
        return asyncio.run(in_place.commit(body, DEADLINE_S))

    commit = await asyncio.to_thread(log.call_midway, engine, update)
    committed = await asyncio.to_thread(commit.result, DEADLINE_S)
    # The prompt of `a` again: nothing of the old weights' KV may be reused.
    after = Work(key("after"), jobs[0].prompt, jobs[0].sampling)
    engine.generate([after])
    await asyncio.to_thread(log.wait_finished, "a", "b", "after")
    assert committed.version == engine.stats().version == version
    assert (committed.n_retracted, committed.n_aborted) == {
        "retract": (2, 0),
        "abort": (0, 2),
    }.get(in_flight, (0, 0))
    assert set(log["after"].versions) == {version}
    check_fresh(log, after, model)
    crosses = in_flight in ("keep", "retract")
    assert [set(log[job.key[0]].versions) for job in jobs] == 2 * [{0, version} if crosses else {0}]


async def test_nothing_is_sampled_when_the_store_is_gone_in_the_middle_of_an_update(
    store: StoreHarness, build: Build, log: StepLog
) -> None:
    engine = build()
    version, model = await publish(store, 1)
    loop = asyncio.get_running_loop()

    def on_write(n: int, raw: RawTensor) -> RawTensor:
        if n == N_BEFORE:
            asyncio.run_coroutine_threadsafe(store.kill(), loop).result(DEADLINE_S)
        return raw

    log.hold(5)
    running = work("running", 40)
    engine.generate([running])
    in_place = InPlace(Watched(engine, on_write), chunk_bytes=CHUNK_BYTES)

    def update() -> None:
        asyncio.run(take(in_place, store, version, "retract"))

    updating = await asyncio.to_thread(log.call_midway, engine, update)
    with pytest.raises(PeerLost):
        await asyncio.to_thread(updating.result, DEADLINE_S)
    n_steps = engine.stats().steps
    waiting = work("waiting", 10)
    engine.generate([waiting])
    check_unreadable(engine)
    stats = engine.stats()
    assert (stats.is_torn, stats.version, stats.steps) == (True, 0, n_steps)
    assert log["waiting"].tokens == []

    await store.start()
    async with asyncio.timeout(DEADLINE_S):
        await take(InPlace(engine.overwriter), store, version)
    await asyncio.to_thread(log.wait_finished, "running", "waiting")
    assert (engine.stats().version, engine.stats().is_torn) == (version, False)
    assert set(log["waiting"].versions) == {version}
    check_fresh(log, waiting, model)
    check_versions(log, running, {0: make_model("llama", 0), version: model})


@pytest.mark.parametrize("mended_by", ["overwrite", "staged"])
async def test_an_update_that_went_wrong_leaves_it_torn_until_a_whole_one_came(
    store: StoreHarness, build: Build, log: StepLog, mended_by: str
) -> None:
    engine = build()
    first, _ = await publish(store, 1)

    def flip(n: int, raw: RawTensor) -> RawTensor:
        wrong = np.array(raw)
        wrong[0] ^= n == N_BEFORE
        return wrong

    job = work("waiting", 30)
    with pytest.raises(EngineFailed) as caught:
        await take(InPlace(Watched(engine, flip), chunk_bytes=CHUNK_BYTES), store, first)
    assert caught.value.code == "digest_mismatch"
    engine.generate([job])
    assert (engine.stats().is_torn, engine.stats().version, engine.stats().steps) == (True, 0, 0)

    second, model = await publish(store, 2)
    if mended_by == "overwrite":
        await take(InPlace(engine.overwriter), store, second)
    else:
        state = dict(model.named_parameters())
        raw = {n: t.detach().view(-1).view(torch.uint8).numpy() for n, t in state.items()}
        engine.weights.install(second, raw, "keep")
    await asyncio.to_thread(log.wait_finished, "waiting")
    assert set(log["waiting"].versions) == {second}
    check_fresh(log, job, model)


async def test_weights_that_are_not_finite_are_never_sampled_from(
    store: StoreHarness, build: Build, log: StepLog
) -> None:
    engine = build()
    model = make_model("llama", 0)
    tensors = {name: each.detach().clone() for name, each in model.named_parameters()}
    tensors["model.norm.weight"][3] = float("nan")
    version = await put(store, tensors)
    with pytest.raises(EngineFailed) as caught:
        await take(InPlace(engine.overwriter), store, version)
    assert caught.value.field == "tensors.model.norm.weight"
    engine.generate([work("waiting", 5)])
    assert engine.stats().is_torn
    assert log["waiting"].tokens == []


async def test_a_store_that_is_gone_before_the_first_byte_tears_nothing(
    store: StoreHarness, build: Build, log: StepLog
) -> None:
    engine = build()
    version, _ = await publish(store, 1)
    in_place = InPlace(engine.overwriter)
    ask = PrepareUpdate("default", version, store.bulk, "tcp", mode="overwrite")
    in_place.agree(ask, await manifest_of(store, ask))
    await store.kill()
    with pytest.raises(PeerLost):
        await in_place.commit(CommitUpdate("default", version, "keep"), DEADLINE_S)
    job = work("after", 10)
    engine.generate([job])
    await asyncio.to_thread(log.wait_finished, "after")
    assert set(log["after"].versions) == {0}
