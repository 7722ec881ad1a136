"""A fleet brought up on this machine: it serves, heals, and leaves nothing behind."""

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

import rolloutbus
from rolloutbus import Fleet, RolloutClient, SamplingParams
from rolloutbus.bus.actor.supervisor import ProcessEvent, RestartRule
from rolloutbus.errors import ActorStopped, ProcessFailed, SettingsError
from rolloutbus.launcher.fleet import children_of
from rolloutbus.launcher.plan import LEDGER, environment
from rolloutbus.launcher.settings import FleetSettings, Transport, UpOptions
from rolloutbus.replay.journal.files import lock
from rolloutbus.trainer_adapter.client import blocking
from rolloutbus.trainer_adapter.store.ledger import LEDGER_FILE, Ledger
from tests.integration.live_fleet import DEADLINE_S, START_S, process_ends

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(480),
    pytest.mark.usefixtures("runtime_dir"),
]

FIVE = SamplingParams(max_new_tokens=5, sampling_seed=1)


def tree_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    return [pid, *(each for child in children_of(pid) for each in tree_of(child))]


def leftovers(runtime_dir: Path) -> list[str]:
    """Files of fleets; the lock that all fleets of a user share may stay."""
    return [path.name for path in runtime_dir.glob("rolloutbus-*/*") if path.name != "lock"]


async def five_tokens(client: RolloutClient) -> list[int]:
    # Some of those who ask have just killed who would answer.
    rollout = await client.generate([1, 2, 3], FIVE, deadline_s=START_S)
    return rollout.tokens.tolist()


@contextlib.asynccontextmanager
async def fake_fleet(
    transport: Transport = "ipc",
) -> AsyncGenerator[tuple[Fleet, RolloutClient]]:
    async with (
        rolloutbus.up(engine="fake", workers=2, transport=transport) as fleet,
        rolloutbus.connect(fleet.address) as client,
    ):
        yield fleet, client


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_fleet_serves_and_leaves_nothing(transport: Transport, runtime_dir: Path) -> None:
    before = tree_of(os.getpid())
    async with fake_fleet(transport=transport) as (fleet, client):
        assert fleet.address.startswith(transport)
        assert fleet.worker_names == ["w0", "w1"]
        assert len(await five_tokens(client)) == 5
        pids = set(tree_of(os.getpid())) - set(before)
        assert set(fleet.pids.values()) <= pids
    for pid in pids:
        await process_ends(pid)
    assert leftovers(runtime_dir) == []


async def test_killed_worker_comes_back_and_serves() -> None:
    async with fake_fleet() as (fleet, client):
        before = fleet.pids
        wanted = await five_tokens(client)
        fleet.kill("w0")
        assert await five_tokens(client) == wanted
        await fleet.wait_ready(START_S)
        assert fleet.pids["w0"] not in (0, before["w0"])
        assert fleet.pids["w1"] == before["w1"]
        fleet.kill("w1")
        assert await five_tokens(client) == wanted


async def test_worker_outlives_its_engine_host() -> None:
    async with fake_fleet() as (fleet, client):
        before = fleet.pids
        hosts = {name: children_of(fleet.pids[name]) for name in fleet.worker_names}
        for name in fleet.worker_names:
            fleet.kill_engine_host(name)
        assert len(await five_tokens(client)) == 5
        assert fleet.pids == before
        with pytest.raises(SettingsError, match="no worker 'w7': there are w0, w1"):
            fleet.kill_engine_host("w7")
        for host in (host for each in hosts.values() for host in each):
            await process_ends(host)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_requests_go_on_when_the_router_is_killed(transport: Transport) -> None:
    async with fake_fleet(transport=transport) as (fleet, client):
        wanted = await five_tokens(client)
        fleet.kill_router()
        assert await five_tokens(client) == wanted
        status = await client.status()
        assert status.router_epoch == 2
        assert fleet.pids["router"] != 0


async def test_engine_that_cannot_be_built_is_the_reason_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    (tmp_path / "model.safetensors").touch()
    fleet = rolloutbus.up(model=tmp_path, workers=1)
    with pytest.raises(ProcessFailed, match=r"^w0: engine_failed: .*nonsense"):
        await fleet.__aenter__()


async def test_port_in_use_is_the_reason_given(runtime_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        fleet = rolloutbus.up(engine="fake", address=address)
        with pytest.raises(ProcessFailed, match=f"router: cannot listen on {address}: Address"):
            await fleet.__aenter__()
    assert leftovers(runtime_dir) == []


# --- a plain `with`


def test_a_program_without_asyncio_brings_a_fleet_up_and_leaves_nothing(runtime_dir: Path) -> None:
    before = tree_of(os.getpid())
    with (
        rolloutbus.up(engine="fake", workers=2) as fleet,
        rolloutbus.connect_sync(fleet.address) as client,
    ):
        first, second = [
            client.submit([1, 2, 3], FIVE, worker=worker, deadline_s=START_S)
            for worker in ("w0", "w1")
        ]
        tokens = first.result(START_S).tokens.tolist()
        assert second.result(START_S).tokens.tolist() == tokens
        fleet.kill("w0")
        again = client.generate([1, 2, 3], FIVE, worker="w0", deadline_s=START_S)
        assert again.tokens.tolist() == tokens, "it is started again while the program waits"
    assert leftovers(runtime_dir) == []
    assert set(tree_of(os.getpid())) <= set(before)


def test_an_error_of_the_program_goes_through_a_plain_block(runtime_dir: Path) -> None:
    with pytest.raises(ZeroDivisionError), rolloutbus.up(engine="fake"):
        raise ZeroDivisionError
    assert leftovers(runtime_dir) == []


def test_a_fleet_that_cannot_begin_says_why_in_a_plain_block(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    (tmp_path / "model.safetensors").touch()
    with (
        pytest.raises(ProcessFailed, match=r"^w0: engine_failed: .*nonsense"),
        rolloutbus.up(model=tmp_path, workers=1),
    ):
        raise AssertionError("its block must not begin")


def test_ctrl_c_while_a_plain_block_begins_ends_what_has_begun(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree_of(os.getpid())
    python, left = tmp_path / "python", tmp_path / "left"
    leave = f"trap 'touch {left}; exit 0' TERM"
    w0 = f"""{leave}; echo '{{"told": "begun"}}'; tail -f /dev/null & wait"""
    case = f'case "$*" in */w0.json) {w0} ;; esac'
    python.write_text(f"#!/bin/sh\n{case}\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o700)
    main = threading.get_ident()

    def interrupt(event: ProcessEvent) -> None:
        if event.what == "begun":
            signal.pthread_kill(main, signal.SIGINT)

    # A run in the background has it ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(blocking, "LAST_TURNS_S", 0.0)  # what is not waited for is killed at once
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            rolloutbus.up(interrupt, engine="fake", workers=1, store=False, python=python),
        ):
            raise AssertionError("its block must not begin")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert left.exists(), "it was told to leave, and had the time"
    assert leftovers(runtime_dir) == []
    assert set(tree_of(os.getpid())) <= set(before)


class Told(logging.Handler):
    """Keeps the first message, and wakes who waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.message = ""
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.message = record.getMessage()
        self.came.set()


def test_a_fleet_that_fails_under_a_plain_program_is_told_at_once_and_raised_at_the_end() -> None:
    told, log = Told(), logging.getLogger("rolloutbus.launcher.plain_block")
    fleet = Fleet(FleetSettings(engine="fake"), restarts=RestartRule(max_deaths=0))

    def work() -> None:
        with fleet:
            fleet.kill("w0")
            assert told.came.wait(START_S)

    log.addHandler(told)
    try:
        with pytest.raises(ProcessFailed, match="w0"):
            work()
    finally:
        log.removeHandler(told)
    assert "leaving the `with` block raises it" in told.message


# --- the command line


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "rolloutbus.cli.main", *arguments]


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command(*arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


@contextlib.contextmanager
def running_up(*arguments: str) -> Generator[subprocess.Popen[str]]:
    """`rolloutbus up` with the fake engine, ready; killed at the end if it still runs."""
    process = subprocess.Popen(
        command("up", "--engine", "fake", *arguments),
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            said = iter(process.stdout.readline, "")
            assert any(line.startswith("Stop with") for line in said)
            yield process
        finally:
            process.kill()


def test_commands_find_the_fleet_that_runs_here() -> None:
    with running_up("-n", "2"):
        status = json.loads(call("status", "--json").stdout)
        assert {worker["name"] for worker in status["workers"]} == {"w0", "w1"}
        whole = call("generate", "--prompt-ids", "1,2,3", "--max-new-tokens", "5")
        assert len(whole.stdout.strip().split(",")) == 5
        streamed = call("generate", "--prompt-ids", "1,2,3", "--max-new-tokens", "5", "--stream")
        assert streamed.stdout == whole.stdout
        assert call("pause").stdout == "w0: done\nw1: done\n"
        assert " paused " in call("status").stdout
        assert call("resume", "--worker", "w0").stdout == "w0: done\n"
        unknown = call("pause", "--worker", "w9")
        assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 1)
        assert "w9" in unknown.stderr
        wrong = call("generate", "--prompt-ids", "1,2,3", "--versions", "foo")
        assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
        assert "'foo'" in wrong.stderr


@pytest.mark.parametrize(
    ("setting", "place", "why"),
    [
        ("weights_dir", "file/deeper", "weights_dir: .*file is not a directory"),
        ("weights_dir", "/proc/nowhere", "weights_dir: cannot write in /proc: "),
        ("record", "file", "record: .*file is not a directory"),
        ("record", ".", "must be closed to others"),
        ("journal", "file", "journal: .*file is not a directory"),
        ("http", "", "http: cannot listen at 127.0.0.1:"),
    ],
)
def test_what_cannot_be_had_is_told_before_anything_starts(
    setting: str, place: str, why: str, tmp_path: Path, runtime_dir: Path
) -> None:
    events: list[ProcessEvent] = []
    (tmp_path / "file").touch()
    tmp_path.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        options: UpOptions = {"engine": "fake", "workers": 1}
        options |= {"http": port} if setting == "http" else {setting: tmp_path / place}  # type: ignore[typeddict-item] - one of the paths
        fleet = rolloutbus.up(events.append, **options)
        with pytest.raises(SettingsError, match=why), fleet:
            pass
    assert events == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert leftovers(runtime_dir) == []


def test_a_directory_in_use_is_told_before_anything_starts(
    tmp_path: Path, runtime_dir: Path
) -> None:
    events: list[ProcessEvent] = []
    ledger = Ledger(tmp_path / "weights" / LEDGER / LEDGER_FILE)
    journal = lock(tmp_path / "journal")
    described: list[tuple[UpOptions, str]] = [
        (
            {"engine": "fake", "weights_dir": tmp_path / "weights"},
            "another weight store uses .*weights",
        ),
        (
            {"engine": "fake", "record": tmp_path / "journal"},
            "another recorder writes to .*journal",
        ),
    ]
    for options, why in described:
        fleet = rolloutbus.up(events.append, **options)
        with pytest.raises(SettingsError, match=why), fleet:
            pass
    os.close(journal)
    ledger.close()
    assert events == []
    assert leftovers(runtime_dir) == []


def test_a_second_fleet_takes_nothing_over_from_the_first() -> None:
    with running_up("-n", "1", "--name", "first") as first, running_up("-n", "1") as second:
        unclear = call("pause")
        assert unclear.returncode == 2
        assert "say which one with --name (default, first)" in unclear.stderr
        assert call("pause", "--name", "first").stdout == "w0: done\n"
        assert " paused " in call("status", "--name", "first").stdout
        assert " ready " in call("status", "--name", "default").stdout
        listed = json.loads(call("ls", "--json").stdout)
        assert [(each["name"], each["pid"]) for each in listed] == [
            ("first", first.pid),
            ("default", second.pid),
        ]
        taken = call("up", "--engine", "fake", "--name", "first")
        assert (taken.returncode, taken.stderr.count("\n")) == (2, 1)
        assert "a fleet named first runs here already" in taken.stderr
        second.terminate()
        second.wait(DEADLINE_S)
        assert " paused " in call("status").stdout, "only the first is left"


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["ctrl-c", "sigterm"]
)
def test_up_leaves_no_process_and_no_file(
    number: signal.Signals, status: int, runtime_dir: Path
) -> None:
    with running_up() as process:
        pids = tree_of(process.pid)
        assert len(pids) == 1 + 2 + 2 * 2
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == status
        for pid in pids:
            asyncio.run(process_ends(pid))
    assert leftovers(runtime_dir) == []


def test_killed_up_takes_its_processes_along_and_the_next_one_its_files(runtime_dir: Path) -> None:
    with running_up() as process:
        descriptors = [os.pidfd_open(pid) for pid in tree_of(process.pid)]
        process.kill()
        for descriptor in descriptors:
            assert _ends(descriptor)
    with running_up():
        assert len(list(runtime_dir.glob("rolloutbus-*/run-*"))) == 1


def _ends(descriptor: int) -> bool:
    """Whether the process of a pidfd ends in time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        return bool(poll.poll(DEADLINE_S * 1000))
    finally:
        os.close(descriptor)


def test_scale_and_restart_reach_the_fleet_that_runs_here() -> None:
    with running_up("-n", "1", "--no-store"):
        scaled = call("scale", "-n", "2", "--json")
        assert json.loads(scaled.stdout) == {"workers": ["w0", "w1"]}
        assert "w1 serves version 0 of policy default\n" in scaled.stderr
        (listed,) = json.loads(call("ls", "--json").stdout)
        assert listed["workers"] == 2
        assert call("restart", "w0").stdout.endswith("2 workers: w0, w1\n")
        assert call("drain", "w1").stdout == "w1 has drained, and leaves\n"
        for refused, why in (
            (
                ("scale", "-n", "0"),
                "error: workers: at least 1 is needed; leave the fleet to end it",
            ),
            # And w1, until its process has ended.
            (("restart", "w7"), "error: no worker 'w7': there are w0"),
        ):
            result = call(*refused)
            assert (result.returncode, result.stderr.count("\n")) == (2, 1)
            assert result.stderr.startswith(why)


@pytest.fixture
def python_without_w1(tmp_path: Path) -> Path:
    """An interpreter by which no worker w1 ever comes: it waits for a word that nobody says."""
    python, word = tmp_path / "python", tmp_path / "word"
    os.mkfifo(word)
    hold = f"case \"$*\" in */w1.json) read -r _ < '{word}' ;; esac"
    python.write_text(f"#!/bin/sh\n{hold}\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o700)
    return python


@contextlib.contextmanager
def scaling(to: int) -> Generator[subprocess.Popen[str]]:
    """`rolloutbus scale` that has begun to start workers."""
    process = subprocess.Popen(
        command("scale", "-n", str(to)),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert " started as process " in process.stdout.readline()
            yield process
        finally:
            process.kill()


def test_ctrl_c_while_workers_come_leaves_nothing_behind(
    runtime_dir: Path, python_without_w1: Path
) -> None:
    with running_up("-n", "1", "--no-store", "--engine-python", str(python_without_w1)) as up:
        first = set(tree_of(up.pid))
        with scaling(to=4) as scale:
            scale.send_signal(signal.SIGINT)
            assert scale.wait(DEADLINE_S) == 130
        # The next change waits until what was begun is ended again.
        assert call("scale", "-n", "1").stdout == "1 worker: w0\n"
        assert set(tree_of(up.pid)) == first
        with scaling(to=4) as scale:
            pids = tree_of(up.pid)
            up.send_signal(signal.SIGINT)
            assert up.wait(DEADLINE_S) == 130
            assert scale.wait(DEADLINE_S) == 1
            assert scale.stderr is not None
            assert scale.stderr.read().startswith("error: the ")
        for pid in pids:
            asyncio.run(process_ends(pid))
    assert leftovers(runtime_dir) == []


async def test_a_change_that_is_under_way_ends_with_its_fleet(runtime_dir: Path) -> None:
    started = asyncio.Event()

    def heard(event: ProcessEvent) -> None:
        if (event.name, event.kind) == ("w2", "started"):
            started.set()

    async with rolloutbus.up(heard, engine="fake", workers=1, store=False) as fleet:
        growing = asyncio.create_task(fleet.scale(3))
        async with asyncio.timeout(DEADLINE_S):
            await started.wait()
        pids = [each for pid in fleet.pids.values() if pid for each in tree_of(pid)]
    with pytest.raises(ActorStopped, match="the fleet has ended"):
        await growing
    for pid in pids:
        await process_ends(pid)  # an engine host learns of its parent's end, and ends then
    assert leftovers(runtime_dir) == []


def test_a_program_without_asyncio_scales_its_fleet() -> None:
    with (
        rolloutbus.up(engine="fake", workers=1, store=False) as fleet,
        rolloutbus.connect_sync(fleet.address) as client,
    ):
        fleet.wait_for(fleet.scale(2))
        assert {worker.name for worker in client.status().workers} == {"w0", "w1"}
        fleet.wait_for(fleet.remove_worker("w0"))
        assert fleet.worker_names == ["w1"]


def test_nobody_at_the_address_is_told_from_other_failures() -> None:
    result = call("status", "--address", "tcp://127.0.0.1:1")
    assert result.returncode == 3
    nobody = "error: no router answers at tcp://127.0.0.1:1: nothing listens there; "
    assert result.stderr == f"{nobody}`rolloutbus ls` lists the fleets of this machine\n"


def test_port_in_use_is_one_line_on_the_command_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = call("up", "--engine", "fake", "--address", f"tcp://127.0.0.1:{port}")
    assert result.returncode == 1
    complaint = f"error: router: cannot listen on tcp://127.0.0.1:{port}: Address already in use"
    assert result.stderr.startswith(complaint)
    assert result.stderr.count("\n") == 1
