"""A real router's journal makes a fresh core do the same, and shows where another would not."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import rolloutbus
from rolloutbus import Fleet, RolloutClient
from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.launcher.plan import environment
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.journal.records import Router, TurnRecord
from rolloutbus.replay.turn_writer import TurnWriter
from rolloutbus.router.actor import RouterActor
from rolloutbus.router.settings import RouterSettings
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.key_directory import KeyDirectory
from tests.integration.live_fleet import (
    DEADLINE_S,
    ENDLESS,
    START_S,
    Streamed,
    fake_sampling,
    serves_at,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(5 * START_S)]

SLOW: UpOptions = {
    "workers": 3,
    "engine": "fake",
    "engine_options": {"step_s": 0.01},
    "store": False,
    "tap": True,
}
"""An endless rollout takes minutes."""
ANY = "tcp://127.0.0.1:0"
N_TOKENS = 30
WIDTH = 8
"""Requests under way at once."""


def settings_of(fleet: Fleet, security: SecuritySettings | None = None) -> ClientSettings:
    return ClientSettings(
        name="c",
        router=fleet.address,
        security=security,
        overtime_s=DEADLINE_S,
        connect_timeout_s=DEADLINE_S,
    )


async def replayed(journal: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, what was printed as JSON, and the errors of `rolloutbus replay --core`."""
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "rolloutbus.cli.main",
            "replay",
            str(journal),
            "--core",
            "--json",
        ),
        *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    async with asyncio.timeout(START_S):
        out, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, json.loads(out or b"{}"), errors.decode()


@asynccontextmanager
async def load(client: RolloutClient) -> AsyncGenerator[None]:
    """Requests without a pause until the end of the context; all of them must finish."""
    is_over = False

    async def ask(number: int) -> None:
        i = 0
        while not is_over:
            i += 1
            await client.generate([number, i], fake_sampling(N_TOKENS), deadline_s=START_S)

    async with asyncio.TaskGroup() as tasks:
        for number in range(WIDTH):
            tasks.create_task(ask(number))
        try:
            yield
        finally:
            is_over = True


async def test_a_router_that_lost_a_worker_under_load_is_repeated_to_the_letter(
    tmp_path: Path,
) -> None:
    journal = tmp_path / "turns"
    async with (
        rolloutbus.up(**{**SLOW, "journal": journal}) as fleet,
        RolloutClient(settings_of(fleet)) as client,
        load(client),
    ):
        doomed = Streamed(client, [1], fake_sampling(ENDLESS), deadline_s=2 * START_S)
        await doomed.reached(1)
        fleet.kill(doomed.worker)
        await doomed.grown_by(N_TOKENS)
        await fleet.wait_ready(START_S)
        await doomed.cut()

    status, told, errors = await replayed(journal)
    assert status == 0, (told, errors)
    assert told["crashes"] == []
    assert (told["is_same"], told["routers"], told["unplayable"]) == (True, 1, 0)
    turns = [each for each in Journal(journal) if isinstance(each, TurnRecord)]
    assert told["turns"] == len(turns)
    assert any("lost" in sent(each) for each in turns)

    status, told, errors = await replayed(journal, "--set", "seed=1", "--set", "queue_limit=10000")
    assert status == 1
    assert errors == "error: the cores did not do the same\n"
    first = told["first"]
    assert any(" generate c/" in line for line in first["expected"])
    at = next(each for each in turns if each.n == first["turn"])
    assert "generate" in sent(at)
    assert first["record"] == at.seq


def sent(turn: TurnRecord) -> list[str]:
    """Kinds of the entries that a turn led to."""
    return [entry.kind for _, said in turn.outcome.effects for entry in said or []]


async def test_a_router_that_comes_after_a_killed_one_goes_on_in_the_same_journal(
    tmp_path: Path,
) -> None:
    journal = tmp_path / "turns"
    async with (
        rolloutbus.up(workers=1, engine="fake", store=False, journal=journal) as fleet,
        RolloutClient(settings_of(fleet)) as client,
    ):
        await client.generate([1], fake_sampling(N_TOKENS), deadline_s=DEADLINE_S)
        fleet.kill_router()
        await client.generate([2], fake_sampling(N_TOKENS), deadline_s=START_S)
    status, told, errors = await replayed(journal)
    assert status == 1
    assert errors.startswith("interruption: 000001.")
    status, told, errors = await replayed(journal, "--allow-gaps")
    assert status == 0, (told, errors)
    assert told["routers"] == 2
    assert sum(isinstance(each, Router) for each in Journal(journal)) == 2


async def test_a_guarded_router_is_repeated_too(tmp_path: Path) -> None:
    journal = tmp_path / "turns"
    async with rolloutbus.up(
        workers=1, engine="fake", store=False, secure=tmp_path / "keys", journal=journal
    ) as fleet:
        keys = KeyDirectory(tmp_path / "keys")
        keys.add("c", "client")
        async with RolloutClient(settings_of(fleet, keys.client_settings("c"))) as client:
            await client.generate([1], fake_sampling(N_TOKENS), deadline_s=DEADLINE_S)
    status, told, errors = await replayed(journal)
    assert status == 0, (told, errors)
    assert any(
        each.stimulus.event == "signed" for each in Journal(journal) if isinstance(each, TurnRecord)
    )


async def test_a_router_by_hand_keeps_its_turns_until_it_is_told_to_leave(tmp_path: Path) -> None:
    journal = tmp_path / "turns"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolloutbus.cli.main", "router", "--journal", str(journal)),
        *("--frontend", f"ipc://{tmp_path}/f", "--backend", f"ipc://{tmp_path}/b"),
        stdout=asyncio.subprocess.PIPE,
        env=environment(),
    )
    await serves_at(process)
    async with asyncio.timeout(DEADLINE_S):
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    source = Journal(journal)
    assert [each for each in source if isinstance(each, TurnRecord)]
    assert source.is_closed


async def test_what_holds_no_turns_and_what_is_no_setting_is_said_in_one_line(
    tmp_path: Path,
) -> None:
    status, _, errors = await replayed(tmp_path)
    assert (status, errors) == (1, f"error: {tmp_path} holds no journal\n")
    status, _, errors = await replayed(tmp_path, "--set", "queue_limit")
    assert (status, errors) == (2, "error: 'queue_limit' is not NAME=JSON\n")


async def test_the_turn_that_ends_a_router_is_the_last_one_in_its_journal(tmp_path: Path) -> None:
    async with TurnWriter(tmp_path / "turns", "1", pytest.fail) as writer:
        router = RouterActor(RouterSettings(ANY, ANY), "r", log=writer)

        def crash(now: float) -> int:
            raise KeyError(now > 0)

        router.core.context.detached.tick = crash
        async with router:
            with pytest.raises(KeyError):
                await router.stopped()
    *_, last = [each for each in Journal(tmp_path / "turns") if isinstance(each, TurnRecord)]
    assert (last.stimulus.event, last.outcome.crash) == ("tick", "KeyError: True")
