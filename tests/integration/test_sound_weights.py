"""What cannot be weights fails when it is staged, and what is active stays."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import (
    AbortUpdate,
    Committed,
    CommitUpdate,
    Prepared,
    PrepareUpdate,
    Transport,
    UpdateMode,
)
from rolloutbus.engine_worker.engine import Step
from rolloutbus.engine_worker.engines.fake.engine import FakeEngine
from rolloutbus.engine_worker.engines.fake.settings import FakeSettings
from rolloutbus.engine_worker.host.commands import HostCommands
from tests.integration.live_fleet import DEADLINE_S
from tests.integration.relay_family import put
from tests.integration.store_harness import StoreHarness, store_harness

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

Model = dict[str, torch.Tensor]


def model(fill: float) -> Model:
    return {"embed.weight": torch.full((8, 4), fill), "head.weight": torch.full((4,), fill)}


def ignore(_: Step) -> None:
    """Nobody reads the tokens."""


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(FakeSettings(), ignore)
    yield engine
    engine.close()


class Worker:
    """The commands of one engine host."""

    def __init__(self, store: StoreHarness, engine: FakeEngine) -> None:
        self._store = store
        self._commands = HostCommands(engine, DEADLINE_S)

    async def prepare(
        self, tensors: Model, transport: Transport = "shm", mode: UpdateMode = "staged"
    ) -> tuple[int, msgspec.Struct]:
        version = await put(self._store, tensors)
        return version, await self.prepare_version(version, transport, mode)

    async def prepare_version(
        self, version: int, transport: Transport = "shm", mode: UpdateMode = "staged"
    ) -> msgspec.Struct:
        ask = PrepareUpdate("default", version, self._store.bulk, transport, mode=mode)
        return await self._do("prepare_update", ask)

    async def give_up(self, version: int) -> msgspec.Struct:
        return await self._do("abort_update", AbortUpdate("default", version))

    async def commit(self, version: int) -> msgspec.Struct:
        return await self._do("commit_update", CommitUpdate("default", version, "keep"))

    async def take(self, tensors: Model, mode: UpdateMode = "staged") -> int:
        version, prepared = await self.prepare(tensors, mode=mode)
        assert isinstance(prepared, Prepared)
        assert isinstance(await self.commit(version), Committed)
        return version

    async def _do(self, kind: str, body: msgspec.Struct) -> msgspec.Struct:
        return (await self._commands.carry_out(Entry(kind, "c/1", body=pack(body))))[1]


class Held:
    """The first call of a method of an engine's weights, which waits until it may go on."""

    def __init__(self, engine: FakeEngine, patch: pytest.MonkeyPatch, method: str) -> None:
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()
        self._call = getattr(engine.weights, method)
        patch.setattr(engine.weights, method, self._wait_and_call)

    def _wait_and_call(self, *arguments: object) -> object:
        if not self.has_begun.is_set():
            self.has_begun.set()
            assert self.may_go_on.wait(DEADLINE_S)
        return self._call(*arguments)


class Counted:
    """How often a method of an engine's weights was called."""

    def __init__(self, engine: FakeEngine, patch: pytest.MonkeyPatch, method: str) -> None:
        self.n_calls = 0
        self._call = getattr(engine.weights, method)
        patch.setattr(engine.weights, method, self._count_and_call)

    def _count_and_call(self, *arguments: object) -> object:
        self.n_calls += 1
        return self._call(*arguments)


async def test_an_engine_gives_its_spare_memory_back_before_a_version_comes_to_its_gpu(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    giving_back = Counted(engine, monkeypatch, "give_back_spares")
    async with store_harness(tmp_path) as store:
        worker = Worker(store, engine)
        await worker.take(model(1.0))
        await worker.take(model(2.0))
        assert giving_back.n_calls == 0
        version, prepared = await worker.prepare(model(3.0), "cuda_ipc")
        assert isinstance(prepared, Prepared)
        assert prepared.transport == "shm"
        assert prepared.why == "this worker cannot take weights by cuda_ipc"
        assert giving_back.n_calls == 1
        assert isinstance(await worker.commit(version), Committed)
        await worker.prepare(model(4.0), "cuda_ipc")
        assert giving_back.n_calls == 1  # it would be made anew for each version
        await worker.prepare(model(5.0), "shm")
        await worker.prepare(model(6.0), "collective")
        assert giving_back.n_calls == 2


@pytest.mark.parametrize("is_given_up", [False, True], ids=["wanted", "given up"])
async def test_a_version_is_installed_only_once_it_is_staged_and_found_sound(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, is_given_up: bool
) -> None:
    staging = Held(engine, monkeypatch, "stage")
    async with store_harness(tmp_path) as store:
        worker = Worker(store, engine)
        version = await put(store, model(2.0))
        preparing = asyncio.create_task(worker.prepare_version(version))
        assert await asyncio.to_thread(staging.has_begun.wait, DEADLINE_S)
        early = await worker.commit(version)
        assert isinstance(early, Problem)
        assert "not staged" in early.message
        giving_up = asyncio.create_task(worker.give_up(version)) if is_given_up else None
        await asyncio.sleep(0)
        staging.may_go_on.set()
        prepared = await preparing
        if giving_up is None:
            assert isinstance(prepared, Prepared)
            assert isinstance(await worker.commit(version), Committed)
            assert engine.stats().version == version
        else:
            await giving_up
            assert isinstance(prepared, Problem)
            assert "given up" in prepared.message
            assert isinstance(await worker.commit(version), Problem)
            assert engine.stats().version == 0


async def test_an_install_reads_its_own_bytes_though_newer_versions_were_staged_meanwhile(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    installing = Held(engine, monkeypatch, "install")
    async with store_harness(tmp_path, keep_sealed=1) as store:
        worker = Worker(store, engine)
        version, prepared = await worker.prepare(model(1.0))
        assert isinstance(prepared, Prepared)
        committing = asyncio.create_task(worker.commit(version))
        assert await asyncio.to_thread(installing.has_begun.wait, DEADLINE_S)
        for fill in (2.0, 3.0):
            assert isinstance((await worker.prepare(model(fill)))[1], Prepared)
        await put(store, model(4.0))  # the store writes it to memory that nobody reads
        installing.may_go_on.set()
        assert isinstance(await committing, Committed)
    assert engine.content["head.weight"] == model(1.0)["head.weight"].numpy().tobytes()


async def test_an_install_reads_its_own_bytes_though_it_was_given_up_and_another_one_came(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    installing = Held(engine, monkeypatch, "install")
    async with store_harness(tmp_path) as store:
        worker = Worker(store, engine)
        version, _ = await worker.prepare(model(1.0), "tcp")
        committing = asyncio.create_task(worker.commit(version))
        assert await asyncio.to_thread(installing.has_begun.wait, DEADLINE_S)
        await worker.give_up(version)
        prepared = (await worker.prepare(model(2.0), "tcp"))[1]
        assert isinstance(prepared, Prepared)
        assert prepared.transport == "tcp"
        installing.may_go_on.set()
        assert isinstance(await committing, Committed)
    assert engine.content["head.weight"] == model(1.0)["head.weight"].numpy().tobytes()


async def test_a_version_given_up_while_an_older_one_is_unstaged_fails_as_such(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_harness(tmp_path) as store:
        worker = Worker(store, engine)
        good = await worker.take(model(1.0))
        unstaging = Held(engine, monkeypatch, "unstage")
        version = await put(store, model(2.0))
        preparing = asyncio.create_task(worker.prepare_version(version))
        assert await asyncio.to_thread(unstaging.has_begun.wait, DEADLINE_S)
        await worker.give_up(version)
        unstaging.may_go_on.set()
        problem = await preparing
        assert isinstance(problem, Problem)
        assert (problem.code, "was given up" in problem.message) == ("update_failed", True)
        assert isinstance(await worker.commit(version), Problem)
        assert engine.stats().version == good
        assert await worker.take(model(3.0)) > version


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
async def test_a_version_of_a_diverged_trainer_is_not_staged(
    tmp_path: Path, engine: FakeEngine, transport: Transport, bad: float
) -> None:
    async with store_harness(tmp_path) as store:
        worker = Worker(store, engine)
        good = await worker.take(model(1.0))
        held = dict(engine.content)
        tensors = model(2.0)
        tensors["head.weight"][3] = bad
        version, problem = await worker.prepare(tensors, transport)
        assert isinstance(problem, Problem)
        assert (problem.code, problem.field) == ("bad_request", "tensors.head.weight")
        assert isinstance(await worker.commit(version), Problem)
        assert (engine.stats().version, dict(engine.content)) == (good, held)
        assert await worker.take(model(3.0)) > version


async def test_a_tensor_that_became_all_zero_is_refused_by_name(
    tmp_path: Path, engine: FakeEngine
) -> None:
    async with store_harness(tmp_path) as store:
        worker = Worker(store, engine)
        half = {**model(1.0), "head.weight": torch.zeros(4)}
        await worker.take(half)  # it was zero before
        _, problem = await worker.prepare({**model(1.0), "embed.weight": torch.zeros(8, 4)})
        assert isinstance(problem, Problem)
        assert (problem.code, problem.field) == ("bad_request", "tensors.embed.weight")
        await worker.take(half)


async def test_a_version_goes_over_the_old_one_and_needs_no_room_beside_it(
    tmp_path: Path, engine: FakeEngine
) -> None:
    async with store_harness(tmp_path) as store:
        worker = Worker(store, engine)
        await worker.take(model(1.0))
        version = await worker.take(model(2.0), "overwrite")
        assert engine.stats().version == version
        assert engine.content["head.weight"] == model(2.0)["head.weight"].numpy().tobytes()
        misfit = {**model(3.0), "head.weight": torch.ones(5)}
        _, problem = await worker.prepare(misfit, mode="overwrite")
        assert isinstance(problem, Problem)
        assert problem.field == "tensors.head.weight"
        assert not engine.stats().is_torn
