"""A full disk ends a recording; fleets go on, without a journal and without new weights."""

import asyncio
import resource
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

import rolloutbus
from rolloutbus import RolloutClient
from rolloutbus.bus.actor.process import ActorExit
from rolloutbus.bus.wire.errors import EngineFailed, Refused
from rolloutbus.launcher.plan import environment
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from rolloutbus.trainer_adapter.publisher.publisher import WeightPublisher
from tests.integration.live_fleet import (
    DEADLINE_S,
    PATIENT,
    START_S,
    assert_fake_rollout,
    fake_sampling,
    serves_at,
)
from tests.integration.store_harness import store_harness

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

FLEET: UpOptions = {"workers": 1, "engine": "fake", "store": False, "tap": True, "lease": PATIENT}
N_TOKENS = 40
N_BLOCKS = 64
"""Of 512 or 1024 bytes, as shells count: what a file may have, in the place of a disk."""


async def limited(*arguments: str) -> asyncio.subprocess.Process:
    """`rolloutbus …` on a disk that is full soon."""
    command = shlex.join([sys.executable, "-m", "rolloutbus.cli.main", *arguments])
    return await asyncio.create_subprocess_exec(
        *("sh", "-c", f"ulimit -f {N_BLOCKS}; exec {command}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )


async def first_with(word: bytes, lines: asyncio.StreamReader) -> bytes:
    """The first line that has this word."""
    while word not in (line := await lines.readline()):
        assert line, "it ended before"
    return line


async def sample(client: RolloutClient, number: int) -> None:
    rollout = await client.generate([number], fake_sampling(N_TOKENS), deadline_s=DEADLINE_S)
    assert_fake_rollout([number], rollout, N_TOKENS)


def settings(router: str) -> ClientSettings:
    return ClientSettings(
        name="c", router=router, overtime_s=DEADLINE_S, connect_timeout_s=DEADLINE_S
    )


async def test_a_full_disk_ends_the_recording_with_a_word_and_not_the_bus(tmp_path: Path) -> None:
    async with rolloutbus.up(**FLEET) as fleet, RolloutClient(settings(fleet.address)) as client:
        recorder = await limited("record", str(tmp_path / "j"), "--address", fleet.address)
        ended = asyncio.ensure_future(recorder.communicate())
        number = 0
        async with asyncio.timeout(START_S):
            while not ended.done():  # until there is more to record than room
                number += 1
                await sample(client, number)
        _, errors = ended.result()
        await sample(client, 0)
    assert recorder.returncode == 1
    assert errors.decode().splitlines()[-1] == "error: recording has ended: File too large"
    journal = Journal(tmp_path / "j")
    numbers = [each.seq for each in journal]
    assert numbers == list(range(len(numbers)))
    assert journal.torn is None


async def test_a_router_whose_journal_has_no_room_says_so_and_goes_on(tmp_path: Path) -> None:
    process = await limited(
        *("router", "--journal", str(tmp_path / "turns")),
        *("--frontend", f"ipc://{tmp_path}/f", "--backend", f"ipc://{tmp_path}/b"),
    )
    assert process.stderr is not None
    try:
        await serves_at(process)
        async with asyncio.timeout(DEADLINE_S):
            async with RolloutClient(settings(f"ipc://{tmp_path}/f")) as client:
                warning = asyncio.ensure_future(first_with(b"journal", process.stderr))
                while not warning.done():  # every answer is a turn
                    await client.status()
                await client.status()
    finally:
        process.terminate()
        await process.wait()
    assert warning.result().decode() == (
        "warning: the router's journal has a hole from now on: File too large; "
        "the router goes on without it, and tries again every 10 s\n"
    )
    assert process.returncode == 0


SMALL = {"a": torch.arange(64.0)}
MANY = {f"layer.{number}.weight": torch.ones(1) for number in range(4_000)}
"""Their names and digests take more room than a ledger has to spare."""
SMALL_BYTES = 4096
"""Far below the end of a ledger that holds them: what room it has to spare is of no use."""


async def test_a_store_on_a_full_disk_refuses_to_publish_and_lives_until_there_is_room(
    tmp_path: Path, full_disk: Callable[..., AbstractContextManager[None]]
) -> None:
    async with store_harness(tmp_path) as harness, asyncio.timeout(START_S):
        publisher = WeightPublisher(harness)
        assert (await publisher.publish(SMALL)).version == 1
        size_bytes = (tmp_path / "store/versions.ledger").stat().st_size
        harness.limit_files(size_bytes)
        with pytest.raises((Refused, EngineFailed), match=r"File too large; make room"):
            await publisher.publish(MANY)
        await harness.kill()
        with full_disk(size_bytes):
            await harness.start()
        assert harness.hello is not None
        assert harness.hello.store is not None
        assert harness.hello.store.committed == {"default": 1}
        with pytest.raises((Refused, EngineFailed), match=r"File too large; make room"):
            await publisher.publish(MANY)
        harness.limit_files(resource.RLIM_INFINITY)
        assert (await publisher.publish(MANY)).version == 2


async def test_a_store_that_is_killed_while_its_disk_is_full_leaves_its_versions_to_the_next(
    tmp_path: Path, full_disk: Callable[..., AbstractContextManager[None]]
) -> None:
    async with store_harness(tmp_path) as harness, asyncio.timeout(START_S):
        assert (await WeightPublisher(harness).publish(MANY)).version == 1
        digests = await harness.digests_kept(1)
        await harness.kill()
        with full_disk(SMALL_BYTES):
            await harness.start()
            assert await harness.digests_kept(1) == digests
            await harness.kill()
        await harness.start()
        assert await harness.digests_kept(1) == digests


async def test_a_store_whose_ledger_cannot_be_written_ends_and_the_next_has_its_versions(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with store_harness(tmp_path) as harness, asyncio.timeout(START_S):
        publisher = WeightPublisher(harness)
        assert (await publisher.publish(MANY)).version == 1
        digests = await harness.digests_kept(1)
        harness.limit_files(SMALL_BYTES)
        publishing = asyncio.ensure_future(publisher.publish(SMALL, deadline_s=START_S))
        assert await harness.ended() == ActorExit.FAILED
        *others, said = capfd.readouterr().err.splitlines()
        assert others == []
        assert said.startswith("error: the store ends, as its ledger cannot be written: ")
        assert "versions.ledger: File too large; the versions are kept in shared memory" in said
        assert said.endswith("and start the store again with the same directory")
        await harness.start()
        assert await harness.digests_kept(1) == digests
        assert (await publishing).version == 2
