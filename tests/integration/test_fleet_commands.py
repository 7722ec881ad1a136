"""A command that some worker did not do cannot be overlooked; router and workers are played."""

import asyncio
import inspect
import subprocess
import sys
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rolloutbus import RolloutClient, SyncRolloutClient, connect, connect_sync
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import EngineFailed, Refused
from rolloutbus.bus.wire.messages.control import FleetOutcome, FleetStatus, WorkerOutcome
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.membership import Lease, Member, Welcome
from rolloutbus.cli.terminal import ExitStatus
from rolloutbus.errors import FleetCommandFailed
from rolloutbus.types import FleetResult
from tests.conformance.representatives import NAMES
from tests.integration.live_fleet import DEADLINE_S, START_S
from tests.integration.pretend_router import PretendRouter

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

BUSY = Problem("busy", "The worker runs requests; wait for them or pause it.", "not_started")
NEEDED: dict[str, tuple[str, ...]] = {
    "load_lora": ("judge",),
    "unload_lora": ("judge",),
    "shutdown_worker": ("w0",),
}
"""Arguments that a command cannot do without."""


def commands_of(client: type) -> list[str]:
    """Public methods that tell how each worker ended a command."""
    return [
        name
        for name, method in inspect.getmembers(client, inspect.isfunction)
        if not name.startswith("_") and typing.get_type_hints(method).get("return") is FleetResult
    ]


COMMANDS = commands_of(RolloutClient)


class HalfFleet:
    """Of three workers `w0` does everything, `w1` is busy, and `w2` is silent."""

    def __init__(self, folder: Path) -> None:
        self._router = PretendRouter(folder, self._answers)
        self.address = self._router.address
        self.troubled: tuple[str, ...] = ("w1", "w2")
        self.is_deserted = False
        self.asked: list[str] = []

    def close(self) -> None:
        self._router.close()

    def _answers(self, entry: Entry) -> list[Entry]:
        match entry.kind:
            case "hello":
                member = Member("w0", "b.1", "", "ready", 0, "default")
                return [Entry("welcome", body=pack(Welcome(1, "r", 1, [member])))]
            case "client_beat":
                return [Entry("lease", body=pack(Lease(1, "r", 1)))]
            case "status":
                status = FleetStatus(1, "r", False, [], {}, 0, 0, 1, {})  # noqa: FBT003
                return [Entry("finished", entry.rid, body=pack(status))]
            case "goodbye":
                return []
            case kind:
                self.asked.append(kind)
                return [Entry("finished", entry.rid, body=pack(self._outcome(kind)))]

    def _outcome(self, kind: str) -> FleetOutcome:
        if self.is_deserted:
            return FleetOutcome([], [])
        done = WorkerOutcome("w0", "finished", NAMES[f"finished.{kind}"].body)
        busy = WorkerOutcome("w1", "refused", pack(BUSY))
        results = [each for each in (done, busy) if each.worker != "w1" or "w1" in self.troubled]
        return FleetOutcome(results, ["w2"] if "w2" in self.troubled else [])


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[HalfFleet]:
    fleet = HalfFleet(tmp_path)
    yield fleet
    fleet.close()


Call = Callable[..., Awaitable[FleetResult]]
Caller = Callable[[str], Call]


@asynccontextmanager
async def _async_caller(address: str) -> AsyncGenerator[Caller]:
    async with connect(address, name="c") as client:
        yield lambda name: getattr(client, name)


@asynccontextmanager
async def _sync_caller(address: str) -> AsyncGenerator[Caller]:
    client = connect_sync(address, name="c")
    await asyncio.to_thread(client.__enter__)

    def call(name: str) -> Call:
        def in_thread(*args: Any, **options: Any) -> Awaitable[FleetResult]:  # noqa: ANN401
            return asyncio.to_thread(getattr(client, name), *args, **options)

        return in_thread

    try:
        yield call
    finally:
        await asyncio.to_thread(client.__exit__, None, None, None)


@pytest_asyncio.fixture(params=[_async_caller, _sync_caller])
async def caller(
    fleet: HalfFleet, request: pytest.FixtureRequest
) -> AsyncIterator[Callable[[str], Call]]:
    async with request.param(fleet.address) as call:
        yield call


def test_sync_client_has_the_same_commands() -> None:
    assert commands_of(SyncRolloutClient) == COMMANDS
    assert {"pause", "resume", "sleep", "wake_up", "flush_cache", "start_profile"} <= {*COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
async def test_command_that_two_of_three_did_not_do_raises_who_and_why(
    caller: Caller, command: str
) -> None:
    call, args = caller(command), NEEDED.get(command, ())
    with pytest.raises(FleetCommandFailed) as caught:
        await call(*args, deadline_s=DEADLINE_S)
    error = caught.value
    text = str(error)
    assert "2 of 3 targets did not do it" in text
    assert "w1: Refused: busy: The worker runs requests" in text
    assert "w2: no answer" in text
    assert "done by w0" in text
    assert error.outcome == "unknown", "the silent one may have done it"
    assert isinstance(error.result.by_worker["w1"], Refused)

    result = await call(*args, deadline_s=DEADLINE_S, check=False)
    assert [*result.errors] == ["w1"]
    assert result.silent == ["w2"]


@pytest.mark.parametrize("command", COMMANDS)
async def test_command_that_all_did_returns_their_results(
    fleet: HalfFleet, caller: Caller, command: str
) -> None:
    fleet.troubled = ()
    result = await caller(command)(*NEEDED.get(command, ()), deadline_s=DEADLINE_S)
    assert [*result.by_worker] == ["w0"]
    result.check()


@pytest.mark.parametrize("command", COMMANDS)
async def test_command_that_reached_nobody_raises_unless_it_is_kept_for_later(
    fleet: HalfFleet, caller: Caller, command: str
) -> None:
    fleet.is_deserted = True
    call, args = caller(command), NEEDED.get(command, ())
    if command in ("pause", "resume"):
        assert not (await call(*args, deadline_s=DEADLINE_S)).by_worker
        return
    with pytest.raises(Refused, match="no worker is there") as caught:
        await call(*args, deadline_s=DEADLINE_S)
    assert (caught.value.code, caught.value.outcome) == ("not_ready", "not_started")
    result = await call(*args, deadline_s=DEADLINE_S, check=False)
    assert not result.by_worker


@pytest.mark.parametrize("verb", ["pause", "resume"])
async def test_verb_that_two_of_three_did_not_do_says_so_and_fails(
    fleet: HalfFleet, verb: str
) -> None:
    result = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "rolloutbus.cli.main", verb, "--address", fleet.address],
        stdout=subprocess.PIPE,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert result.returncode == ExitStatus.FAILED
    assert result.stdout.splitlines()[0] == "w0: done"
    assert "w1: busy" in result.stdout
    assert "w2: no answer" in result.stdout


async def test_caches_are_reset_loudly_and_paused_workers_go_on(fleet: HalfFleet) -> None:
    async with connect(fleet.address, name="c") as client:
        with pytest.raises(FleetCommandFailed):
            await client.reset_prefix_cache(reset_running_requests=True)
    assert fleet.asked == ["pause", "flush_cache", "resume"]


def _outcome(*outcomes: str) -> str:
    errors = {
        f"w{n}": EngineFailed(Problem("x", "y", outcome))  # type: ignore[arg-type] - one of its words
        for n, outcome in enumerate(outcomes)
    }
    with pytest.raises(FleetCommandFailed) as caught:
        FleetResult(errors).check()
    return caught.value.outcome


def test_outcome_is_certain_only_where_all_are() -> None:
    assert _outcome("not_started", "not_started") == "not_started"
    assert _outcome("not_started", "failed") == "failed"
    assert _outcome("failed", "unknown") == "unknown"


def test_error_of_a_large_fleet_names_a_few() -> None:
    result = FleetResult({f"w{n:03}": Refused(BUSY) for n in range(500)})
    with pytest.raises(FleetCommandFailed, match=r"500 of 500 .*w007.* and 492 more") as caught:
        result.check()
    assert len(str(caught.value)) < 2000
