"""Fixtures for tests with the real SGLang; an engine takes 20 s to start, so fleets are shared.

They run in an environment of their own (`make test-sglang`), since SGLang pins what it needs.
"""

import importlib.util
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus import Fleet, RolloutClient
from rolloutbus.errors import ProcessFailed
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.sglang.fleets import fleet_of, worker_environment
from tests.sglang.models import save_model
from tests.sglang.redis_server import EXECUTABLE, redis_server
from tests.sglang.reference import SameWeights

DEADLINE_S = 120.0
HANG_S = 1200
"""Of a test and of the fleets that start for it, each of which may take minutes among others."""
KEEPING = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
"""Arguments of an engine that can sleep, and wakes up with the weights it had."""
HERE = Path(__file__).parent
IS_MISSING = importlib.util.find_spec("sglang") is None
collect_ignore = ["test_media.py"] if IS_MISSING else []
"""What cannot be imported without the packages beside SGLang."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(HANG_S))
            item.add_marker(pytest.mark.xdist_group(_fleet_of(item)))
            if IS_MISSING:
                item.add_marker(pytest.mark.skip("sglang is not installed: make test-sglang"))


def _fleet_of(item: pytest.Item) -> str:
    """Tests of the session's fleets run in one process, those of a module's own in another."""
    assert isinstance(item, pytest.Function)
    shared = {"fleet", "client", "operated"}.difference(vars(item.module))
    return "shared" if shared.intersection(item.fixturenames) else item.path.stem


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """Processes that are started meanwhile find the stand-ins; this one has no engine."""
    before = dict(os.environ)
    os.environ.update(worker_environment())
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random Llama of 0.2 M parameters, float32, and its tokenizer."""
    return save_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a Qwen2, whose input and output embeddings are one tensor."""
    return save_model("qwen2", tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="session")
def reference(llama: Path) -> SameWeights:
    """Forward passes of the Llama, for rollouts of `fleet`."""
    return SameWeights(llama)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet(llama: Path) -> AsyncIterator[Fleet]:
    """One worker with the Llama and a tap, for every test that leaves it as it was: unpaused, its
    weights those of the Llama, of whatever version."""
    options: UpOptions = {**fleet_of(llama, **KEEPING), "tap": True}
    try:
        async with rolloutbus.up(**options) as running:
            yield running
    except ProcessFailed as failed:
        failed.add_note(failed.log)
        raise


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(fleet: Fleet) -> AsyncIterator[RolloutClient]:
    """A client of that fleet."""
    settings = ClientSettings(name="tests", router=fleet.address, overtime_s=DEADLINE_S)
    async with RolloutClient(settings) as connected:
        yield connected


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def redis_port(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[int]:
    """Of a Redis on this host; 1, where nobody listens, if there is none for this Python."""
    if not EXECUTABLE.exists():
        yield 1
        return
    async with redis_server(tmp_path_factory.mktemp("redis")) as port:
        yield port


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def operated(
    llama: Path, redis_port: int, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RolloutClient]:
    """A client of a fleet with places to write to, whose weights are lost when it sleeps."""
    place = tmp_path_factory.mktemp("operated")
    options = fleet_of(llama, enable_memory_saver=True)
    options |= {
        "save_targets": {
            "models": str(place),
            "nowhere": "redis://127.0.0.1:1/model",
            "redis": f"redis://127.0.0.1:{redis_port}/run",
        },
        "profile_dir": place / "profiles",
    }
    async with rolloutbus.up(**options) as fleet:
        settings = ClientSettings(name="operator", router=fleet.address, overtime_s=DEADLINE_S)
        async with RolloutClient(settings) as connected:
            yield connected
