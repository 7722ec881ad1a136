"""A supervisor and real processes: small scripts, each a few lines of Python."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolloutbus.bus.actor.child import Child, OnNotice, OnProgress, OnReady, ProcessSpec
from rolloutbus.bus.actor.supervisor import ProcessEvent, RestartRule, Supervisor
from rolloutbus.bus.wire.errors import ActorStopped, DeadlineExceeded, ProcessFailed
from tests.integration.live_fleet import DEADLINE_S, START_S, process_ends

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

READY = 'print(\'{"ready": {"at": "here"}}\', flush=True)'
SERVE = f"import signal; {READY}; signal.pause()"
STUBBORN = f"import signal; signal.signal(15, signal.SIG_IGN); {READY}\nwhile True: signal.pause()"

Spec = Callable[..., ProcessSpec]


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    def build(name: str, script: str, **options: Any) -> ProcessSpec:  # noqa: ANN401 - as it takes
        command = [sys.executable, "-c", script]
        return ProcessSpec(name, command, tmp_path / f"{name}.log", **options)

    return build


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


async def test_process_that_dies_is_started_again(spec: Spec) -> None:
    async with Supervisor() as supervisor:
        [process] = supervisor.start(spec("a", SERVE))
        await supervisor.wait_ready(DEADLINE_S)
        first = process.pid
        process.kill()
        await supervisor.wait_ready(DEADLINE_S)
        assert process.pid not in (0, first)
        assert process.endpoints == {"at": "here"}


async def test_what_a_process_does_until_it_is_ready_is_known(spec: Spec, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    lines = '{"doing": "loading weights"}\\n{"told": "now"}'
    told = asyncio.Event()

    def heard(event: ProcessEvent) -> None:
        if event.kind == "told":
            told.set()

    async with Supervisor(on_event=heard) as supervisor:
        supervisor.start(
            spec("a", f"print('{lines}', flush=True); open({str(go)!r}).read(); {SERVE}")
        )
        assert supervisor.waits_for == {"a": "starting"}
        await asyncio.wait_for(told.wait(), DEADLINE_S)
        assert supervisor.waits_for == {"a": "loading weights"}
        await asyncio.to_thread(go.write_text, "")
        await supervisor.wait_ready(DEADLINE_S)
        assert supervisor.waits_for == {}


async def test_a_process_that_is_late_dies_once_and_says_why(spec: Spec) -> None:
    events: list[ProcessEvent] = []
    twice = asyncio.Event()

    def heard(event: ProcessEvent) -> None:
        if not twice.is_set():  # the second one may be late, too, before it is stopped
            events.append(event)
        if [each.kind for each in events].count("started") == 2:
            twice.set()

    async with Supervisor(RestartRule(max_deaths=9, first_s=0.001), heard) as supervisor:
        supervisor.start(spec("a", "import signal; signal.pause()", ready_timeout_s=0.2))
        async with asyncio.timeout(DEADLINE_S):
            await twice.wait()
    (death,) = [each.what for each in events if each.kind == "died"]
    assert "SIGKILL: it was not ready within 0.2 s" in death


async def test_what_dies_too_often_ends_the_body_with_one_error(spec: Spec) -> None:
    pids: list[int] = []

    async def body() -> None:
        rule = RestartRule(max_deaths=2, window_s=START_S, first_s=0.001)
        async with Supervisor(rule) as supervisor:
            [other] = supervisor.start(spec("b", SERVE))
            await supervisor.wait_ready(DEADLINE_S)
            pids.append(other.pid)
            supervisor.start(spec("a", f"{READY}; import sys; sys.exit('no luck today')"))
            await asyncio.Event().wait()

    with pytest.raises(ProcessFailed, match="a: exited with status 1, 3 times in") as failed:
        await body()
    assert "no luck today" in failed.value.log
    assert not is_alive(pids[0])
    current = asyncio.current_task()
    assert current is not None
    assert not current.cancelling()


async def test_what_cannot_be_started_is_told_and_on_trial_it_fails_alone(spec: Spec) -> None:
    impossible = spec("b", SERVE)
    impossible.log.mkdir()
    async with Supervisor() as supervisor:
        rank = supervisor.start(spec("a", SERVE))
        trial = supervisor.add(rank, impossible)
        async with asyncio.timeout(DEADLINE_S):
            await trial.ended()
        assert "b: it cannot be started: [Errno 21] Is a directory" in str(trial.failure)
        assert trial.pid == 0
        await rank[0].wait_ready()

    async def body() -> None:
        async with Supervisor() as supervisor:
            supervisor.start(impossible)
            await asyncio.Event().wait()

    with pytest.raises(ProcessFailed, match="b: it cannot be started"):
        await body()


async def test_a_process_on_trial_fails_alone(spec: Spec) -> None:
    ended = asyncio.Event()
    async with Supervisor(RestartRule(max_deaths=0)) as supervisor:
        rank = supervisor.start(spec("a", SERVE))
        await supervisor.wait_ready(DEADLINE_S)
        trial = supervisor.add(rank, spec("b", "import sys; sys.exit('no luck today')"))
        trial.on_end = ended.set
        async with asyncio.timeout(DEADLINE_S):
            await ended.wait()
        assert trial.failure is not None
        assert "no luck today" in trial.failure.log
        assert rank[0].is_ready
    with pytest.raises(ActorStopped, match="c is not started"):
        supervisor.add(rank, spec("c", SERVE))


async def test_a_process_that_may_leave_is_not_started_again_however_it_ends(spec: Spec) -> None:
    ended = asyncio.Event()
    async with Supervisor() as supervisor:
        [process] = supervisor.start(spec("a", SERVE))
        await supervisor.wait_ready(DEADLINE_S)
        process.on_end = ended.set
        process.let_leave()
        process.kill()
        async with asyncio.timeout(DEADLINE_S):
            await ended.wait()
        assert process.pid == 0


async def test_reasons_come_out_when_there_is_no_room_for_a_log() -> None:
    events: list[ProcessEvent] = []
    script = (
        "from rolloutbus.bus.actor.process import *\n"
        "warn('the cellar is flooded')\nprint('x', flush=True)\n"
        "complain('no boat')\nimport sys; sys.exit(2)"
    )
    spec = ProcessSpec("a", [sys.executable, "-c", script], Path("/dev/full"))

    async def body() -> None:
        async with Supervisor(on_event=events.append) as supervisor:
            supervisor.start(spec)
            await asyncio.Event().wait()

    with pytest.raises(ProcessFailed, match="a: no boat"):
        await body()
    told = [event.what for event in events if event.kind == "told"]
    assert told == ["warning: the cellar is flooded"], "why it ended is said once, with its end"


async def test_wrong_settings_are_not_tried_again(spec: Spec) -> None:
    script = "import sys; sys.stderr.write('error: port 7 is in use\\n'); sys.exit(2)"
    events: list[ProcessEvent] = []

    async def body() -> None:
        async with Supervisor(on_event=events.append) as supervisor:
            supervisor.start(spec("a", script))
            await supervisor.wait_ready(DEADLINE_S)

    with pytest.raises(ProcessFailed, match=r"^a: port 7 is in use$"):
        await body()
    assert [event.kind for event in events] == ["started"]


async def test_error_of_the_body_comes_out_as_it_is(spec: Spec) -> None:
    pids: list[int] = []

    async def body() -> None:
        async with Supervisor() as supervisor:
            [process] = supervisor.start(spec("a", SERVE))
            await supervisor.wait_ready(DEADLINE_S)
            pids.append(process.pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await body()
    assert not is_alive(pids[0])


async def test_ranks_end_in_the_reverse_order_of_their_start(spec: Spec, tmp_path: Path) -> None:
    script = (
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); "
        f"\ntry: {READY}; signal.pause()\n"
        f"finally: open({str(tmp_path / 'order')!r}, 'a').write(NAME)"
    )
    async with Supervisor() as supervisor:
        for name in "abc":
            supervisor.start(spec(name, script.replace("NAME", repr(name)), grace_s=DEADLINE_S))
        await supervisor.wait_ready(DEADLINE_S)
    assert (tmp_path / "order").read_text() == "cba"


async def test_process_that_ignores_sigterm_is_killed_after_its_grace(spec: Spec) -> None:
    async with Supervisor() as supervisor:
        [process] = supervisor.start(spec("a", STUBBORN, grace_s=0.1))
        await supervisor.wait_ready(DEADLINE_S)
        pid = process.pid
    assert not is_alive(pid)


async def test_grandchildren_end_with_the_child_that_crashed(spec: Spec, tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, signal; "
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); {READY}; signal.pause()"
    )
    died = asyncio.Event()

    def watch(event: ProcessEvent) -> None:
        if event.kind == "died":
            died.set()

    async with Supervisor(on_event=watch) as supervisor:
        [process] = supervisor.start(spec("a", script))
        await supervisor.wait_ready(DEADLINE_S)
        grandchild = int((tmp_path / "pid").read_text())
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            await died.wait()
        await process_ends(grandchild)


@pytest.mark.parametrize(
    ("script", "may_leave"),
    [(READY, True), (f"{READY}; import sys; sys.exit(3)", False)],
    ids=["left", "replaced"],
)
async def test_process_that_left_for_good_is_not_started_again(
    spec: Spec, script: str, *, may_leave: bool
) -> None:
    left = asyncio.Event()

    def watch(event: ProcessEvent) -> None:
        if event.kind == "left":
            left.set()

    async with Supervisor(on_event=watch) as supervisor:
        [process] = supervisor.start(spec("a", script, may_leave=may_leave))
        async with asyncio.timeout(DEADLINE_S):
            await left.wait()
        assert process.pid == 0


async def test_waiting_for_what_is_never_ready_names_it(spec: Spec) -> None:
    async with Supervisor() as supervisor:
        supervisor.start(spec("quick", SERVE))
        await supervisor.wait_ready(DEADLINE_S)
        supervisor.start(spec("slow", "import signal; signal.pause()"))
        with pytest.raises(DeadlineExceeded, match=r"not ready within 0.1 s: slow$"):
            await supervisor.wait_ready(0.1)


async def test_output_goes_to_the_log_and_the_ready_line_does_not(
    spec: Spec, tmp_path: Path
) -> None:
    script = f"import sys; print('hello'); sys.stdout.flush(); {SERVE}"
    async with Supervisor() as supervisor:
        supervisor.start(spec("a", script))
        await supervisor.wait_ready(DEADLINE_S)
    assert (tmp_path / "a.log").read_text() == "hello\n"


class Lost:
    """A program elsewhere, whose first incarnation is lost with its machine."""

    name = "far"
    log = Path(os.devnull)
    ready_timeout_s = 0.0
    may_leave = False

    def __init__(self, second: ProcessSpec) -> None:
        self._second = second
        self._n_started = 0

    async def start(self, on_ready: OnReady, on_notice: OnNotice, on_progress: OnProgress) -> Child:
        self._n_started += 1
        if self._n_started > 1:
            return await self._second.start(on_ready, on_notice, on_progress)
        return LostChild(on_notice)


class LostChild:
    pid = 0
    node = "far away"
    has_ended = True

    def __init__(self, on_notice: OnNotice) -> None:
        self._on_notice = on_notice

    async def wait(self) -> None:
        self._on_notice("error: its machine burns")

    def kill(self) -> None: ...
    async def stop(self) -> None: ...


async def test_what_is_lost_without_an_exit_status_is_started_again(spec: Spec) -> None:
    events: list[ProcessEvent] = []
    async with Supervisor(on_event=events.append) as supervisor:
        [process] = supervisor.start(Lost(spec("far", SERVE)))
        await supervisor.wait_ready(DEADLINE_S)
        assert process.pid != 0
    [died] = [event.what for event in events if event.kind == "died"]
    assert died == "was lost: its machine burns; starting it again in 0.1 s"
