"""Fixtures for tests with real processes: a tiny model, and the fleet that a module describes."""

# pyright: reportUnknownMemberType=false
# torch's and transformers' stubs leave parameters untyped.

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest
import pytest_asyncio
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rolloutbus
from rolloutbus import Fleet, RolloutClient
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.live_fleet import DEADLINE_S, ENDLESS, UNHURRIED
from tests.integration.token_limit import TokenLimit

VOCAB_SIZE = 64
MAX_CONTEXT = ENDLESS + 576
SLOTS = 16
REAL_ENGINES: UpOptions = {
    "workers": 2,
    # Room for an endless rollout in each slot.
    "engine_options": {"threads": 1, "slots": SLOTS, "kv_tokens": SLOTS * MAX_CONTEXT},
}
"""A fleet of two workers with the tiny model, for a module's `FLEET`."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random Llama of about 0.2 M parameters, float32."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_CONTEXT,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where no other fleet of this user is announced; below tmp_path its paths were too long."""
    with tempfile.TemporaryDirectory(prefix="rb-") as path:
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield Path(path)


@pytest.fixture(scope="module")
def token_limit(tmp_path_factory: pytest.TempPathFactory) -> TokenLimit:
    """Holds the requests of this module's fleet, if its engine is the fake one."""
    return TokenLimit(tmp_path_factory.mktemp("token_limit") / "limit")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(
    request: pytest.FixtureRequest, tiny_model: Path, token_limit: TokenLimit
) -> AsyncIterator[Fleet]:
    """What the module's `FLEET` describes; one for all of its tests."""
    async with rolloutbus.up(**_described(request, tiny_model, token_limit)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(request: pytest.FixtureRequest, fleet: Fleet) -> AsyncIterator[RolloutClient]:
    """A client named for the module; on a busy machine it waits longer for what comes late."""
    name = _module(request).__name__.rpartition(".")[2].removeprefix("test_")
    settings = ClientSettings(
        name=name,
        router=fleet.address,
        lease=_options(request, {}).get("lease", UNHURRIED),
        connect_timeout_s=DEADLINE_S,
        control_deadline_s=DEADLINE_S,
        overtime_s=DEADLINE_S,
    )
    async with RolloutClient(settings) as connected:
        yield connected


def _described(
    request: pytest.FixtureRequest, tiny_model: Path, token_limit: TokenLimit
) -> UpOptions:
    options = _options(request)
    if options.get("engine") != "fake":
        return {**options, "model": tiny_model}
    engine_options = {**options.get("engine_options", {}), "hold_file": str(token_limit.path)}
    return {**options, "engine_options": engine_options}


def _options(request: pytest.FixtureRequest, default: UpOptions | None = None) -> UpOptions:
    """The module's `FLEET`; leases are long, unless it says how long they are.

    With a default it may have none, but a fixture of its own.
    """
    options = cast("UpOptions | None", vars(_module(request)).get("FLEET", default))
    assert options is not None, f"{_module(request).__name__} says no FLEET"
    return {"lease": UNHURRIED, **options}


def _module(request: pytest.FixtureRequest) -> ModuleType:
    return cast("ModuleType", request.module)
