"""Control commands meet the fake engine: results, capabilities, typed failures."""

from collections.abc import Iterator

import msgspec
import pytest

from bus.codec import pack
from bus.entry import Entry
from bus.messages.control import FlushCache, Flushed, Memory, Pause, Resume, Sleep, WakeUp
from bus.messages.endings import Done, Problem
from bus.messages.weights import AbortUpdate, Committed, CommitUpdate, Prepared, PrepareUpdate
from engine_worker.control import HOST_COMMANDS
from engine_worker.engine import Step
from engine_worker.engines.fake_engine import FakeEngine
from engine_worker.engines.fake_settings import FakeSettings
from engine_worker.host_commands import HostCommands


def ignore(_: Step) -> None:
    """Nobody reads the tokens."""


@pytest.fixture
def commands() -> Iterator[HostCommands]:
    engine = FakeEngine(FakeSettings(), ignore)
    yield HostCommands(engine, 5.0)
    engine.close()


async def do(commands: HostCommands, kind: str, body: msgspec.Struct) -> tuple[str, msgspec.Struct]:
    return await commands.carry_out(Entry(kind, "c/1", body=pack(body)))


async def test_full_engine_can_do_every_command(commands: HostCommands) -> None:
    assert commands.capabilities == sorted(HOST_COMMANDS)


async def test_pause_and_resume_are_idempotent(commands: HostCommands) -> None:
    for _ in range(2):
        assert await do(commands, "pause", Pause("in_place")) == ("finished", Done())
    for _ in range(2):
        assert await do(commands, "resume", Resume()) == ("finished", Done())


async def test_memory_tags_add_up(commands: HostCommands) -> None:
    _, first = await do(commands, "sleep", Sleep(["kv_cache"]))
    _, second = await do(commands, "sleep", Sleep(["weights"]))
    _, third = await do(commands, "wake_up", WakeUp(["kv_cache"]))
    asleep = [body.asleep for body in (first, second, third) if isinstance(body, Memory)]
    assert asleep == [["kv_cache"], ["kv_cache", "weights"], ["weights"]]


async def test_flush_returns_a_count(commands: HostCommands) -> None:
    assert await do(commands, "flush_cache", FlushCache()) == ("finished", Flushed(0))


async def test_update_to_what_is_active_needs_nothing(commands: HostCommands) -> None:
    prepare = PrepareUpdate("default", 0, "ipc:///nowhere")
    assert await do(commands, "prepare_update", prepare) == ("finished", Prepared(0, 0, "", 0.0))
    commit = CommitUpdate("default", 0, "in_place")
    assert await do(commands, "commit_update", commit) == ("finished", Committed(0, 0.0))


async def test_commit_without_prepare_fails_with_a_hint(commands: HostCommands) -> None:
    kind, body = await do(commands, "commit_update", CommitUpdate("default", 3, "in_place"))
    assert kind == "failed"
    assert isinstance(body, Problem)
    assert (body.code, body.outcome) == ("update_failed", "not_started")


async def test_abort_of_an_update_that_was_never_prepared_is_fine(commands: HostCommands) -> None:
    assert await do(commands, "abort_update", AbortUpdate("default", 9)) == ("finished", Done())
