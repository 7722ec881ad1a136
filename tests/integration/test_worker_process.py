"""A worker process with the fake engine, seen from its router."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rolloutbus.bus.actor.process import PARENT_VARIABLE
from rolloutbus.bus.streams.reassembly import rows_of
from rolloutbus.bus.wire.codec import pack, unpack, unpack_result
from rolloutbus.bus.wire.messages.control import Pause, Resume, ServerFacts, ServerInfo, Shutdown
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.generation import Abort, Deltas, Generated
from rolloutbus.bus.wire.messages.membership import Goodbye, Heartbeat
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.engine_worker.worker.actor import WorkerActor
from tests.integration.live_fleet import DEADLINE_S, START_S, process_ends
from tests.integration.token_limit import TokenLimit
from tests.integration.worker_bench import generate_body, worker_process

pytestmark = [pytest.mark.integration, pytest.mark.timeout(480)]


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(each) for each in text.split()]


async def test_generate_is_accepted_streamed_and_finished(tmp_path: Path) -> None:
    async with worker_process(tmp_path, engine_options={"step_s": 0.01}) as (router, _):
        await router.joined()
        await router.subscribed()
        router.generate("c/1", generate_body(40, stream=True))
        ending = await router.ending("c/1")
        result = unpack_result("generate", ending)
        assert isinstance(result, Generated)
        tokens = np.frombuffer(result.tokens, np.int32)
        assert (len(tokens), result.finish_reason) == (40, "length")
        assert result.versions == [(0, 40)]
        await router.accepted("c/1")

        def streamed() -> bytes:
            found = b""
            for entry in router.published:
                body = unpack(entry)
                if not isinstance(body, Deltas):
                    continue
                for rid, _, row in rows_of(body):
                    if rid == "c/1":
                        assert len(found) // 4 == row.start
                        found += row.tokens
            return found

        await router.until(lambda: len(streamed()) == len(result.tokens))
        assert streamed() == result.tokens


async def test_bad_request_is_refused_and_names_the_field(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as (router, _):
        await router.joined()
        router.generate("c/1", generate_body(5, prompt=(1, 2, 10**6)))
        ending = await router.ending("c/1")
        problem = unpack(ending)
        assert isinstance(problem, Problem)
        assert (ending.kind, problem.code, problem.field) == ("refused", "bad_request", "prompt")


async def test_aborted_request_returns_what_it_has(tmp_path: Path) -> None:
    async with worker_process(tmp_path, engine_options={"step_s": 0.01}) as (router, _):
        await router.joined()
        router.generate("c/1", generate_body(10_000, stream=True))
        await router.until(lambda: len(router.published) > 5)
        router.send("abort", "", pack(Abort(rids=["c/1"])))
        ending = await router.ending("c/1")
        result = unpack_result("generate", ending)
        assert ending.kind == "cancelled"
        assert isinstance(result, Generated)
        assert len(result.tokens) >= 4


async def test_pause_holds_and_resume_goes_on(tmp_path: Path, token_limit: TokenLimit) -> None:
    options = {"step_s": 0.005, "hold_file": str(token_limit.path)}
    async with worker_process(tmp_path, engine_options=options) as (router, _):
        await router.joined()
        with token_limit.at(5):
            router.generate("c/1", generate_body(100))
            await router.accepted("c/1")
            router.send("pause", "c/2@w0", pack(Pause("in_place")))
            assert (await router.ending("c/2@w0")).kind == "finished"
        router.generate("c/3", generate_body(1))
        assert (await router.ending("c/3")).kind == "refused"
        assert router.said("finished", "c/1") == []
        router.send("resume", "c/4@w0", pack(Resume()))
        assert isinstance(unpack_result("resume", await router.ending("c/4@w0")), Done)
        assert (await router.ending("c/1")).kind == "finished"


async def test_engine_host_crash_is_survived_and_endings_are_kept(tmp_path: Path) -> None:
    async with worker_process(tmp_path, engine_options={"step_s": 0.01}) as (router, process):
        await router.joined()
        router.generate("c/1", generate_body(3))
        await router.ending("c/1")
        router.generate("c/2", generate_body(10_000))
        await router.accepted("c/2")
        first_epoch = router.epoch
        (host,) = children(process.pid)
        os.kill(host, signal.SIGKILL)
        goodbye = unpack((await router.until(lambda: router.said("goodbye")))[0])
        assert goodbye == Goodbye("engine_killed")
        await router.until(lambda: router.epoch != first_epoch)
        last = await router.until(
            lambda: [b for b in router.said("beat") if b.epoch != first_epoch]
        )
        heartbeat = unpack(last[0])
        assert isinstance(heartbeat, Heartbeat)
        assert heartbeat.running == []
        assert [rid for rid, _, _ in heartbeat.outbox] == ["c/1"]
        router.generate("c/3", generate_body(3))
        assert (await router.ending("c/3")).kind == "finished"


async def test_hung_engine_is_found_and_its_host_replaced(tmp_path: Path) -> None:
    faults = {"hang_after_steps": 20, "step_s": 0.001}
    patience = {"wedged_s": 1.0}
    async with worker_process(tmp_path, engine_options=faults, host=patience) as (router, process):
        await router.joined()
        (first,) = children(process.pid)
        router.generate("c/1", generate_body(1000))
        await router.until(lambda: router.said("goodbye"))
        await router.until(lambda: len({entry.epoch for entry in router.said("hello")}) > 1)
        assert children(process.pid) != [first]


async def test_engine_that_raises_takes_only_its_host_down(tmp_path: Path) -> None:
    async with worker_process(tmp_path, engine_options={"fail_after_steps": 5}) as (router, _):
        await router.joined()
        router.generate("c/1", generate_body(1000))
        await router.until(lambda: router.said("goodbye"))
        await router.until(lambda: len({entry.epoch for entry in router.said("hello")}) > 1)


async def test_engine_that_cannot_be_built_ends_the_worker_with_a_reason(tmp_path: Path) -> None:
    async with worker_process(tmp_path, engine_options={"slots": 0}) as (router, process):
        async with asyncio.timeout(START_S):
            assert await process.wait() == 4
        assert router.entries == []


async def test_sigterm_says_goodbye_and_leaves_no_process(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as (router, process):
        await router.joined()
        (host,) = children(process.pid)
        process.terminate()
        await router.until(lambda: router.said("goodbye"))
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0
        await process_ends(host)


async def test_worker_that_is_stopped_while_its_host_starts_leaves(tmp_path: Path) -> None:
    place = f"ipc://{tmp_path}"
    worker = WorkerActor(
        WorkerSettings(
            name="w0", router=f"{place}/backend", stream=f"{place}/stream", engine="fake"
        )
    )
    running = asyncio.create_task(worker.run())
    await asyncio.sleep(0)  # it has begun, and its host not yet
    worker.stop()
    async with asyncio.timeout(DEADLINE_S):
        await running


async def test_worker_whose_parent_died_before_it_could_ask_to_be_told_leaves(
    tmp_path: Path,
) -> None:
    place = f"ipc://{tmp_path}"
    settings = WorkerSettings(
        name="w0",
        router=f"{place}/backend",
        stream=f"{place}/stream",
        engine="fake",
        exit_with_parent=True,
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "rolloutbus.engine_worker", "--settings-json"),
        msgspec.json.encode(settings).decode(),
        env={**os.environ, PARENT_VARIABLE: str(2**22 - 1)},
    )
    async with asyncio.timeout(START_S):
        assert await process.wait() == -signal.SIGTERM


async def test_host_dies_with_a_killed_worker(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as (router, process):
        await router.joined()
        (host,) = children(process.pid)
        process.kill()
        await process_ends(host)


async def test_shutdown_drains_first(tmp_path: Path) -> None:
    async with worker_process(tmp_path, engine_options={"step_s": 0.005}) as (router, process):
        await router.joined()
        router.generate("c/1", generate_body(50))
        await router.accepted("c/1")
        router.send("shutdown", "c/2@w0", pack(Shutdown(drain=True)))
        assert (await router.ending("c/1")).kind == "finished"
        assert (await router.ending("c/2@w0")).kind == "finished"
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0


async def test_server_info_tells_the_facts(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as (router, _):
        await router.joined()
        router.send("server_info", "c/1@w0", pack(ServerInfo()))
        facts = unpack_result("server_info", await router.ending("c/1@w0"))
        assert isinstance(facts, ServerFacts)
        assert (facts.engine, facts.state, facts.slots) == ("fake", "ready", 256)
