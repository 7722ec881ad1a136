"""Several hosts on one machine: network namespaces on one bridge, each with its own /dev/shm."""

import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from rolloutbus.launcher.plan import environment
from tests.integration.slow_wire import FAR

DEADLINE_S = 60.0
"""Of most waits."""
START_S = 300.0
"""For what serves to be ready: several engines that start at once on two busy cores. And for
programs that import as much."""
SUBNET = "10.0.0"
"""That of the pages."""
IP, TC = shutil.which("ip") or "", shutil.which("tc") or ""
ENTER = shutil.which("nsenter") or ""
CLI = (sys.executable, "-m", "rolloutbus.cli.main")
# `ip netns exec` gives each process mounts of its own: one keeps those that all of a host enter.
_OWN_SHM = "mount -t tmpfs shm /dev/shm"
_KEEP = f"{_OWN_SHM} && echo kept && exec cat"


@dataclass(frozen=True, slots=True)
class Quality:
    """What the link of each host does to the frames that it sends."""

    delay_ms: float
    jitter_ms: float
    """The delay is up to so much more or less."""
    loss: float
    """Share of the frames."""
    rate_mbit: float
    """Megabits a second."""

    @property
    def netem(self) -> tuple[str, ...]:
        """Options of the kernel's own way to do it."""
        delay = ("delay", f"{self.delay_ms}ms", f"{self.jitter_ms}ms")
        return (*delay, "loss", f"{self.loss:%}", "rate", f"{self.rate_mbit}mbit")


class Host:
    """One of them."""

    def __init__(self, namespace: str, hub: str, address: str, home: Path, keeper: int) -> None:
        """`hub`: the namespace of the bridge, whose port to this host has this one's name.

        `keeper`: id of the process that has the host's network and /dev/shm.
        """
        self._namespace, self._hub = namespace, hub
        self.address = address
        self.home = home
        """Working directory of what runs there."""
        its_own = (ENTER, "--target", str(keeper), "--mount", "--net")
        self._enter = (*its_own, "sh", "-c", 'cd "$0" && exec "$@"', str(home))

    def cut(self) -> None:
        """Cut it off from all others; nobody is told."""
        _ip("-n", self._hub, "link", "set", self._namespace, "nomaster")

    def mend(self) -> None:
        """Undo `cut`."""
        _ip("-n", self._hub, "link", "set", self._namespace, "master", "br0")

    def add_address(self, address: str, seen_by: Iterable["Host"]) -> None:
        """Give it one more, to which some others get a route."""
        _ip("-n", self._namespace, "addr", "add", f"{address}/32", "dev", "eth0")
        for each in seen_by:
            _ip("-n", each._namespace, "route", "add", f"{address}/32", "dev", "eth0")

    async def start(self, *command: str) -> Process:
        """Start a command, its output in one pipe; `rolloutbus` is this one."""
        variables = environment()
        variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}"
        return await asyncio.create_subprocess_exec(
            *(*self._enter, *command),
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            env=variables,
            process_group=0,
        )

    async def run(self, *command: str) -> tuple[int, str]:
        """(exit status, output) of a command."""
        process = await self.start(*command)
        async with asyncio.timeout(START_S):
            output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    async def bus(self, *arguments: str) -> str:
        """What a `rolloutbus` command prints, which must succeed."""
        status, output = await self.run(*CLI, *arguments)
        assert status == 0, output
        return output.strip()

    @asynccontextmanager
    async def serving(self, until: str, *arguments: str) -> AsyncGenerator[Process]:
        """A `rolloutbus` command that has printed `until`; it is ended with the block."""
        async with self.running(until, *CLI, *arguments) as process:
            yield process

    @asynccontextmanager
    async def running(self, until: str, *command: str) -> AsyncGenerator[Process]:
        """The same of any command."""
        process = await self.start(*command)
        try:
            assert process.stdout is not None
            seen: list[str] = []
            async with asyncio.timeout(START_S):
                while until not in "".join(seen[-1:]):
                    line = await process.stdout.readline()
                    assert line, "".join(seen)
                    seen.append(line.decode())
            yield process
        finally:
            await ended(process)

    async def reports(self, module: str, *arguments: str) -> dict[str, Any]:
        """The JSON line that a program of the tests ends with."""
        status, output = await self.run(sys.executable, "-m", module, *arguments)
        assert status == 0, output
        return json.loads(output.strip().splitlines()[-1])


@contextmanager
def hosts(n: int, directory: Path, quality: Quality | None = None) -> Generator[list[Host]]:
    """`n` hosts that reach one another; skips the test where namespaces may not be made.

    `quality`: of their links; None: as fast as they can.
    """
    token = secrets.token_hex(2)
    hub = f"rbh{token}"
    names = [f"rb{index}{token}" for index in range(n)]
    if not (IP and ENTER):
        pytest.skip("there is no `ip` or no `nsenter` here: install iproute2 and util-linux")
    with ExitStack() as stack:
        for name in (*names, hub):
            stack.callback(_delete, name)
        try:
            _ip("netns", "add", hub)
            _ip("-n", hub, "link", "add", "br0", "type", "bridge")
            _ip("netns", "exec", hub, "sh", "-c", _OWN_SHM)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces may be made here: {error.stderr.decode().strip()}")
        _ip("-n", hub, "link", "set", "br0", "up")
        for name in names:
            _ip("netns", "add", name)
        if quality is None:
            _lay_cables(hub, names)
        elif not _has_netem(hub, quality):
            stack.enter_context(_slow_wires(hub, names, quality))
        else:
            _lay_cables(hub, names)
            for name in names:
                _tc("-n", name, *("qdisc", "add", "dev", "eth0", "root", "netem", *quality.netem))
        made: list[Host] = []
        for index, name in enumerate(names):
            _join(name, hub, f"{SUBNET}.{index + 1}")
            home = directory / name
            home.mkdir()
            keeper = stack.enter_context(_kept(name))
            made.append(Host(name, hub, f"{SUBNET}.{index + 1}", home, keeper))
        yield made


@contextmanager
def _kept(namespace: str) -> Generator[int]:
    """A process that has the /dev/shm of this host; yields its id."""
    command = (IP, "netns", "exec", namespace, "sh", "-c", _KEEP)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as keeper:  # it ends with its stdin
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"kept\n"
        yield keeper.pid


def _lay_cables(hub: str, names: list[str]) -> None:
    for name in names:
        peer = ("type", "veth", "peer", "name", name, "netns", hub)
        _ip("link", "add", "eth0", "netns", name, *peer)


def _has_netem(hub: str, quality: Quality) -> bool:
    command = (TC, "-n", hub, "qdisc", "add", "dev", "lo", "root", "netem", *quality.netem)
    tried = subprocess.run(command, check=False, capture_output=True, text=True)
    if tried.returncode and "qdisc kind is unknown" not in tried.stderr:
        raise RuntimeError(tried.stderr)
    return not tried.returncode


@contextmanager
def _slow_wires(hub: str, names: list[str], quality: Quality) -> Generator[None]:
    """The same by a process of ours, and the kernel's token bucket for the rate."""
    command = (IP, "netns", "exec", hub, sys.executable, "-m", "tests.integration.slow_wire")
    options = (json.dumps(asdict(quality)), *names)
    with subprocess.Popen((*command, *options), stdout=subprocess.PIPE, env=environment()) as wires:
        try:
            assert wires.stdout is not None
            assert wires.stdout.readline() == b"ready\n"
            for name in names:
                _ip("-n", hub, "link", "set", f"{name}{FAR}", "netns", name, "name", "eth0")
                rate = ("rate", f"{quality.rate_mbit}mbit", "burst", "64kb", "latency", "100ms")
                _tc("-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)
            yield
        finally:
            wires.kill()


def _join(name: str, hub: str, address: str) -> None:
    _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    for namespace, link in ((name, "lo"), (name, "eth0"), (hub, name)):
        _ip("-n", namespace, "link", "set", link, "up")
    _ip("-n", hub, "link", "set", name, "master", "br0")


def _delete(namespace: str) -> None:
    subprocess.run([IP, "netns", "del", namespace], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run([IP, *arguments], check=True, capture_output=True)


def _tc(*arguments: str) -> None:
    subprocess.run([TC, *arguments], check=True, capture_output=True)


async def ended(process: Process) -> None:
    """End a process and what it has started, and wait."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGTERM)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await process.communicate()
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        raise
