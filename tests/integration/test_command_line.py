"""The command line as a new user meets it: a fleet with a real model, at a terminal."""

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from rolloutbus.cli.fleet_check import fleet_findings
from rolloutbus.cli.terminal import ExitStatus
from rolloutbus.engine_worker.engines.survey.machine import Finding
from rolloutbus.examples.tiny_model import build_tiny_model
from rolloutbus.launcher.plan import environment
from tests.integration.live_fleet import DEADLINE_S, START_S

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2 * START_S)]

CLI = (sys.executable, "-m", "rolloutbus.cli.main")
PATIENT_CLI = (sys.executable, "-m", "tests.integration.patient_cli")


class Running(NamedTuple):
    """A fleet that `rolloutbus up` has brought up."""

    seen: str
    """What was on the terminal until it was ready."""
    journal: Path
    variables: dict[str, str]

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command of the same user."""
        return subprocess.run(
            [*CLI, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=self.variables,
            timeout=START_S,
        )


class Terminal:
    """Keeps reading what a program shows, so that it never waits."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._text = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, words: str) -> str:
        """All that was shown until these words."""
        with self._changed:
            assert self._changed.wait_for(lambda: words in self._text, START_S), self._text
            return self._text

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._descriptor, 4096)
            except OSError:  # the program has closed it
                return
            with self._changed:
                self._text += data.decode(errors="replace")
                self._changed.notify_all()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Generator[Running]:
    directory = tmp_path_factory.mktemp("cli")
    model, journal = directory / "model", directory / "j"
    build_tiny_model(model, seed=0)
    with tempfile.TemporaryDirectory(prefix="rb-") as runtime:
        variables = {**environment(), "XDG_RUNTIME_DIR": runtime, "COLUMNS": "80"}
        ours, theirs = pty.openpty()
        options = ["-n", "1", "--model", str(model), "--record", str(journal)]
        process = subprocess.Popen(
            [*PATIENT_CLI, "up", *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=variables,
        )
        try:
            seen = Terminal(ours).wait_for("Stop with Ctrl-C.")
            yield Running(seen, journal, variables)
        finally:
            process.terminate()
            assert process.wait(DEADLINE_S) == 0
            os.close(theirs)
            os.close(ours)


def test_up_says_at_a_terminal_what_it_waits_for(fleet: Running) -> None:
    # Which moments it catches depends on the machine; the last line is taken away again.
    assert re.search(r"waiting for (\w+[:,][^\n]*)+, \d+ s\r\x1b\[K", fleet.seen)


def test_text_in_text_out_and_token_ids_for_who_wants_them(fleet: Running) -> None:
    options = ["abc", "--max-new-tokens", "4", "--seed", "1"]
    text = fleet.call("generate", *options).stdout
    ids = fleet.call("generate", *options, "--tokens").stdout
    told = json.loads(fleet.call("generate", *options, "--json").stdout)
    assert re.fullmatch(r"\d+(,\d+){0,3}\n", ids)
    assert [*map(int, ids.split(","))] == told["tokens"]
    assert text == f"{told['text']}\n"


def test_lines_of_the_status_stay_whole_in_a_pipe(fleet: Running) -> None:
    *_, router = fleet.call("status").stdout.splitlines()
    assert re.fullmatch(r"router epoch 1.* \| \d+ clients? \| 0 sessions", router)


def test_resume_says_when_nothing_was_paused(fleet: Running) -> None:
    assert fleet.call("resume").stdout == "nothing was paused\n"
    assert fleet.call("pause").stdout == "w0: done\n"
    told = json.loads(fleet.call("resume", "--json").stdout)
    assert told == {"was_paused": True, "workers": {"w0": "done"}}


def test_the_recording_begins_with_the_fleet_and_can_be_played(fleet: Running) -> None:
    rid = json.loads(fleet.call("generate", "--prompt-ids", "1,2", "--json").stdout)["rid"]
    assert_played(fleet, rid)


def assert_played(fleet: Running, rid: str) -> None:
    """The recorder writes a little later than the client hears: look until it is there."""
    for played in plays(fleet):
        if any(each.get("rid") == rid and each["event"] == "finished" for each in played):
            assert played[0]["event"] == "worker_joined"
            return
    pytest.fail(f"{rid} is not in the recording")


def plays(fleet: Running) -> Iterator[list[dict[str, str]]]:
    give_up_at = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up_at:
        done = fleet.call("play", str(fleet.journal), "--speed", "max", "--json")
        yield [json.loads(line) for line in done.stdout.splitlines()]


async def test_doctor_reaches_every_plane_and_compares_clocks(fleet: Running) -> None:
    # Without the survey of this machine, for which torch is imported.
    [running] = json.loads(fleet.call("ls", "--json").stdout)
    found = await findings(running["address"])
    async with asyncio.timeout(DEADLINE_S):
        while {each.state for each in found.values()} != {"ok"}:
            # It waits a few seconds for each, and says so of what is late on a busy machine.
            print(found)
            found = await findings(running["address"])
    assert found.keys() == {"router", "streams of w0", "bulk of the store", "clock of w0"}
    assert "give or take" in found["clock of w0"].says


async def findings(address: str) -> dict[str, Finding]:
    return {each.name: each for each in await fleet_findings(address, "")}


def test_tables_fit_80_columns(fleet: Running) -> None:
    *table, _ = fleet.call("status").stdout.splitlines()  # the last line a terminal wraps
    for line in table:
        assert len(line.rstrip()) <= 80
        assert "…" not in line


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, ExitStatus.INTERRUPTED), (signal.SIGTERM, ExitStatus.TERMINATED)],
)
def test_a_signal_ends_a_command_with_its_status(
    fleet: Running, number: int, status: ExitStatus
) -> None:
    command = [*CLI, "status", "--watch", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=fleet.variables
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == status
        assert process.stderr.read() == b""


def test_a_reader_that_has_seen_enough_is_no_error(fleet: Running) -> None:
    command = [*CLI, "top", "--json", "--interval", "0.1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=fleet.variables
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(DEADLINE_S) == ExitStatus.FAILED
        assert process.stderr.read() == b""
