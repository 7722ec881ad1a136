"""What callers of commands hear when the engine dies that carries them out."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

import rolloutbus
from rolloutbus import RolloutClient
from rolloutbus.errors import EngineFailed, FleetCommandFailed
from rolloutbus.examples.tiny_model import build_tiny_model
from tests.integration.live_fleet import DEADLINE_S, PATIENT, PATIENT_HOST

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

WORKER = "w0"
PATIENT_S = 10 * DEADLINE_S
"""Deadline of commands, far beyond that of the test: who is told by it is told too late."""

Ask = Callable[[RolloutClient], Awaitable[object]]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[rolloutbus.Fleet]:
    build_tiny_model(tmp_path / "model", seed=0)
    (tmp_path / "saved").mkdir()
    async with rolloutbus.up(
        model=tmp_path / "model",
        workers=1,
        save_targets={"saved": tmp_path / "saved"},
        engine_options={"threads": 1},
        lease=PATIENT,
        host=PATIENT_HOST,
    ) as running:
        yield running


ASKS: dict[str, tuple[str, Ask]] = {
    "get_load": ("failed", lambda c: c.get_load(deadline_s=PATIENT_S)),
    "flush_cache": ("failed", lambda c: c.flush_cache(deadline_s=PATIENT_S)),
    "unload_lora": ("failed", lambda c: c.unload_lora("none", deadline_s=PATIENT_S)),
    "score": ("failed", lambda c: c.score([1, 2], [[3]], [5], deadline_s=PATIENT_S)),
    "list_weights": ("failed", lambda c: c.list_weights(WORKER, deadline_s=PATIENT_S)),
    "get_weights": (
        "failed",
        lambda c: c.get_weights("model.norm.weight", WORKER, deadline_s=PATIENT_S),
    ),
    "save_weights": (
        "unknown",
        lambda c: c.save_weights("saved", "now", worker=WORKER, deadline_s=PATIENT_S),
    ),
    "resume": ("unknown", lambda c: c.resume(target=WORKER, deadline_s=PATIENT_S)),
}
"""Command -> (outcome that its caller is told, how it is asked)."""


async def _error(asked: Awaitable[object]) -> EngineFailed:
    """What one worker's caller gets, whichever way it comes."""
    try:
        await asked
    except EngineFailed as error:
        return error
    except FleetCommandFailed as error:
        found = error.result.errors[WORKER]
        assert isinstance(found, EngineFailed)
        return found
    raise AssertionError("it has ended well")


async def test_callers_of_commands_hear_at_once_that_the_engine_was_killed(
    fleet: rolloutbus.Fleet,
) -> None:
    async with asyncio.timeout(DEADLINE_S), rolloutbus.connect(fleet.address) as client:
        (host,) = fleet.host_pids(WORKER)
        os.kill(host, signal.SIGSTOP)  # whatever comes now takes long
        asked = {kind: asyncio.create_task(_error(ask(client))) for kind, (_, ask) in ASKS.items()}
        await asyncio.sleep(0)  # each task has asked
        # So has the router, and the worker has heard: both go in order, and it answers by itself.
        await client.server_info(target=WORKER, deadline_s=DEADLINE_S)
        os.kill(host, signal.SIGKILL)
        heard = {kind: await error for kind, error in asked.items()}
    assert {kind: (error.code, error.outcome) for kind, error in heard.items()} == {
        kind: ("engine_died", outcome) for kind, (outcome, _) in ASKS.items()
    }
    assert all("its engine was killed" in str(error) for error in heard.values())
