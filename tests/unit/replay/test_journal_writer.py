"""A writer that is killed, that has no room, or that is not alone keeps what it has promised."""

import asyncio
import errno
import os
import stat
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.launcher.plan import environment
from rolloutbus.replay.journal.core import JournalSettings
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.journal.records import End, Stream
from rolloutbus.replay.journal.writer import JournalWriter

SCRIBE = Path(__file__).with_name("scribe.py")
DEADLINE_S = 240.0


def stream(rid: str) -> Callable[[int, int], Stream]:
    return lambda seq, at_ns: Stream(seq, at_ns, b"topic", [Entry("idle", rid)])


@asynccontextmanager
async def scribe(directory: Path, limit_bytes: int = 0) -> AsyncGenerator[asyncio.StreamReader]:
    """A process that writes; its lines."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIBE),
        str(directory),
        str(limit_bytes),
        stdout=asyncio.subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield process.stdout
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def durable_of(lines: asyncio.StreamReader) -> int:
    word, number = (await lines.readline()).split()
    assert word == b"durable"
    return int(number)


async def test_what_was_called_durable_survives_kill_9_and_the_next_writer_goes_on(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "j"
    promised = -1
    for _ in range(2):
        async with scribe(directory) as lines:
            first = await durable_of(lines)
            assert first >= promised
            while promised < first + 900:  # several segments; then it is killed as it writes
                promised = await durable_of(lines)
        journal = Journal(directory)
        numbers = [each.seq for each in journal]
        assert numbers == list(range(len(numbers)))
        assert numbers[-1] >= promised
        assert not journal.is_closed

    async with JournalWriter(directory) as writer:
        writer.append(stream("c/last"))

    journal = Journal(directory)
    records = list(journal)
    assert [each.seq for each in records] == list(range(len(records)))
    assert journal.is_closed
    assert journal.torn is None
    reasons = [each.reason for each in records if isinstance(each, End)]
    assert reasons[-1] == "closed"
    assert not list(directory.glob("*.rbj"))


async def test_a_full_disk_ends_the_recording_and_everything_durable_is_there(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "j"
    promised, rest = -1, ""
    async with scribe(directory, limit_bytes=100_000) as lines:
        async for line in lines:
            word, _, rest = line.decode().strip().partition(" ")
            if word == "problem":
                break
            promised = int(rest)
    assert rest == os.strerror(errno.EFBIG)
    journal = Journal(directory)
    assert [each.seq for each in journal] == list(range(promised + 1))
    assert (journal.torn, journal.is_closed) == (None, False)


async def test_files_are_for_their_owner_and_one_writer_only(tmp_path: Path) -> None:
    directory = tmp_path / "j"
    async with JournalWriter(directory) as writer:
        writer.append(stream("c/1"))
        with pytest.raises(SettingsError, match="another recorder"):
            await JournalWriter(directory).__aenter__()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in directory.iterdir()} == {0o600}

    directory.chmod(0o755)
    with pytest.raises(SettingsError, match="chmod 700"):
        await JournalWriter(directory).__aenter__()


async def test_a_writer_that_is_cancelled_as_it_begins_leaves_the_directory_to_the_next(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "j"
    beginning = asyncio.create_task(JournalWriter(directory).__aenter__())
    await asyncio.sleep(0)  # its thread has begun
    beginning.cancel()
    await asyncio.wait([beginning], timeout=DEADLINE_S)
    assert beginning.cancelled()
    async with JournalWriter(directory) as writer:
        writer.append(stream("c/1"))
    assert sum(isinstance(each, Stream) for each in Journal(directory)) == 1


async def test_closing_makes_everything_durable(tmp_path: Path) -> None:
    async with JournalWriter(tmp_path / "j", JournalSettings(sync_s=3600.0)) as writer:
        for i in range(10):
            writer.append(stream(f"c/{i}"))
        assert writer.core.durable == 0
    assert writer.core.durable == writer.core.next_seq - 1 == 11
    assert len(list(Journal(tmp_path / "j"))) == 12


async def test_old_segments_are_deleted_beyond_what_is_to_be_kept(tmp_path: Path) -> None:
    settings = JournalSettings(sync_s=0.001, sync_bytes=1, segment_bytes=2_000, keep_bytes=4_000)
    directory = tmp_path / "j"
    async with JournalWriter(directory, settings) as writer:
        for _ in range(40):
            writer.append(lambda seq, at: Stream(seq, at, os.urandom(900), []))
            async with asyncio.timeout(DEADLINE_S):
                await writer.sync()
    left = sorted(each.name for each in directory.glob("*.rb?"))
    assert "000001.rbz" not in left
    assert sum(each.stat().st_size for each in directory.glob("*.rbz")) <= 4_000 + 2_500
    journal = Journal(directory)
    assert [each.seq for each in journal][-1] == writer.core.next_seq - 1
    assert journal.damages == []


def test_more_may_come_when_something_is_due_at_once_already(tmp_path: Path) -> None:
    async def write() -> None:
        async with JournalWriter(tmp_path / "j", JournalSettings(sync_bytes=1)) as journal:
            for n in range(10):
                journal.append(stream(f"c/{n}"))

    uvloop.run(write())  # the loop of our commands; its handles differ from those of asyncio
    assert sum(isinstance(each, Stream) for each in Journal(tmp_path / "j")) == 10
