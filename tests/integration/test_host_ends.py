"""What a worker makes of an engine host that is killed, dies, is stopped or hangs."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.messages.membership import Goodbye, Heartbeat
from rolloutbus.engine_worker.host.link import HostLink
from rolloutbus.engine_worker.worker.host_process import HostProcess
from tests.integration.live_fleet import DEADLINE_S, PLAYED_ROUTER
from tests.integration.worker_bench import ScriptedRouter, generate_body, worker_process

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

_LEAVES_A_CHILD = """
import os, signal, sys
child = os.fork()
if child == 0:
    signal.pause()
with open(sys.argv[1], "w") as kept:
    kept.write(str(child))
os._exit(3)
"""
"""Like the workers that libraries fork, its child has every descriptor that it has."""
LONG = 1_000_000
"""Tokens of a request that is never done."""


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@asynccontextmanager
async def _busy_host(
    tmp_path: Path, *, wedged_s: float = 30.0, give_up_s: float = 30.0, **options: object
) -> AsyncGenerator[tuple[ScriptedRouter, int]]:
    """A router whose worker runs a request, and the process id of its engine host."""
    engine = {"step_s": 0.01, "max_context": 2 * LONG, **options}
    host = {"wedged_s": wedged_s, "give_up_s": give_up_s}
    async with worker_process(tmp_path, engine_options=engine, host=host, lease=PLAYED_ROUTER) as (
        router,
        process,
    ):
        await router.joined()
        (pid,) = _children(process.pid)
        router.generate("c/1", generate_body(LONG))
        await router.until(lambda: router.said("accepted"))
        yield router, pid


async def _goodbye(router: ScriptedRouter) -> str:
    body = unpack((await router.until(lambda: router.said("goodbye")))[0])
    assert isinstance(body, Goodbye)
    return body.reason


def _states(router: ScriptedRouter) -> list[str]:
    bodies = [unpack(entry) for entry in router.said("beat")]
    return [body.state for body in bodies if isinstance(body, Heartbeat)]


def _running(router: ScriptedRouter) -> list[str]:
    bodies = [unpack(entry) for entry in router.said("beat")]
    (last,) = [body for body in bodies if isinstance(body, Heartbeat)][-1:]
    return [rid for rid, *_ in last.running]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "engine_killed"),
        (signal.SIGTERM, "engine_killed"),
        (signal.SIGSEGV, "engine_crashed"),
    ],
)
async def test_signal_tells_who_is_to_blame(
    tmp_path: Path, number: signal.Signals, reason: str
) -> None:
    async with _busy_host(tmp_path) as (router, pid):
        os.kill(pid, number)
        assert await _goodbye(router) == reason


async def test_engine_process_that_fails_by_its_own_word_is_told_with_that_word(
    tmp_path: Path,
) -> None:
    async with _busy_host(tmp_path) as (router, pid):
        os.kill(pid, signal.SIGQUIT)  # an engine's child tells its parent so
        code, _, words = (await _goodbye(router)).partition(": ")
        assert code == "engine_crashed"
        assert "one of the engine's processes has failed" in words
        await router.until(lambda: len({entry.epoch for entry in router.said("hello")}) > 1)


async def test_engine_that_has_failed_and_cannot_be_closed_is_told_at_once(tmp_path: Path) -> None:
    too_late_s = 10 * DEADLINE_S  # when a host that hangs would be killed
    async with _busy_host(tmp_path, wedged_s=too_late_s, hang_after_steps=20) as (router, pid):
        os.kill(pid, signal.SIGQUIT)  # an engine's child tells its parent so
        assert (await _goodbye(router)).startswith("engine_crashed: ")


async def test_child_that_outlives_the_host_does_not_hide_its_end(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _LEAVES_A_CHILD, str(tmp_path / "child")),
            pass_fds=(theirs.fileno(),),
        )
    host = HostProcess(process, await HostLink.open(ours, lambda _: None))
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert (await host.wait()).reason == "the engine host exited with code 3"
    finally:
        await host.stop()
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


async def test_engine_that_aborts_has_crashed(tmp_path: Path) -> None:
    prompt_begins_with = 1
    async with _busy_host(tmp_path, poison_token=prompt_begins_with) as (router, _):
        assert await _goodbye(router) == "engine_crashed"


async def test_stopped_host_keeps_new_requests_away_and_goes_on_when_it_may(
    tmp_path: Path,
) -> None:
    async with _busy_host(tmp_path) as (router, pid):
        os.kill(pid, signal.SIGSTOP)
        await router.until(lambda: _states(router)[-1] == "frozen")
        router.generate("c/2", generate_body(3))
        os.kill(pid, signal.SIGCONT)
        await router.until(lambda: _states(router)[-1] == "ready")
        assert (await router.ending("c/2")).kind == "finished"
        assert router.said("goodbye") == []


async def test_host_that_stays_stopped_loses_its_requests_to_other_workers(tmp_path: Path) -> None:
    async with _busy_host(tmp_path, give_up_s=2.0) as (router, pid):
        await router.until(lambda: "c/1" in _running(router))
        os.kill(pid, signal.SIGSTOP)
        await router.until(lambda: "c/1" not in _running(router))
        assert _states(router)[-1] == "frozen"
        os.kill(pid, signal.SIGCONT)
        await router.until(lambda: _states(router)[-1] == "ready")
        router.generate("c/2", generate_body(3))
        assert (await router.ending("c/2")).kind == "finished"
        assert router.said("goodbye") == []


async def test_host_that_stays_stopped_is_replaced_and_nobody_is_blamed(tmp_path: Path) -> None:
    async with _busy_host(tmp_path, wedged_s=3.0) as (router, pid):
        os.kill(pid, signal.SIGSTOP)
        assert await _goodbye(router) == "engine_killed"
        assert "frozen" in _states(router)
        await router.until(lambda: len({entry.epoch for entry in router.said("hello")}) > 1)


async def test_engine_that_holds_the_interpreter_is_replaced_and_blamed(tmp_path: Path) -> None:
    async with _busy_host(tmp_path, wedged_s=3.0, hold_gil_after_steps=20) as (router, _):
        assert await _goodbye(router) == "engine_crashed"
        assert "frozen" in _states(router)
        await router.until(lambda: len({entry.epoch for entry in router.said("hello")}) > 1)


async def test_engine_that_hangs_while_its_host_speaks_is_replaced_and_blamed(
    tmp_path: Path,
) -> None:
    async with _busy_host(tmp_path, wedged_s=3.0, hang_after_steps=20) as (router, _):
        assert await _goodbye(router) == "engine_crashed"
