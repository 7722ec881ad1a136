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
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rolloutbus.launcher.plan import environment

DEADLINE_S = 60.0
"""Of every wait."""
SUBNET = "10.77.0"
IP = shutil.which("ip") or ""
CLI = (sys.executable, "-m", "rolloutbus.cli.main")
# `ip netns exec` gives each process mounts of its own.
_OWN_SHM = "mount -t tmpfs shm /dev/shm"


class Host:
    """One of them."""

    def __init__(self, namespace: str, hub: str, address: str, home: Path) -> None:
        """`hub`: the namespace of the bridge, whose port to this host has this one's name."""
        self._namespace, self._hub = namespace, hub
        self.address = address
        self.home = home
        """Working directory of what runs there."""
        in_namespace = (IP, "netns", "exec", namespace)
        self._enter = (*in_namespace, "sh", "-c", f'{_OWN_SHM} && exec "$@"', "sh")

    def cut(self) -> None:
        """Cut it off from all others; nobody is told."""
        _ip("-n", self._hub, "link", "set", self._namespace, "nomaster")

    def mend(self) -> None:
        """Undo `cut`."""
        _ip("-n", self._hub, "link", "set", self._namespace, "master", "br0")

    async def start(self, *command: str) -> Process:
        """Start a command, its output in one pipe."""
        return await asyncio.create_subprocess_exec(
            *(*self._enter, *command),
            cwd=self.home,
            stdout=PIPE,
            stderr=STDOUT,
            env=environment(),
            process_group=0,
        )

    async def run(self, *command: str) -> tuple[int, str]:
        """(exit status, output) of a command."""
        process = await self.start(*command)
        async with asyncio.timeout(DEADLINE_S):
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
        process = await self.start(*CLI, *arguments)
        try:
            assert process.stdout is not None
            seen: list[str] = []
            async with asyncio.timeout(DEADLINE_S):
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
def hosts(n: int, directory: Path) -> Generator[list[Host]]:
    """`n` hosts that reach one another; skips the test where namespaces may not be made."""
    token = secrets.token_hex(2)
    hub = f"rbh{token}"
    names = [f"rb{index}{token}" for index in range(n)]
    if not IP:
        pytest.skip("there is no `ip` command here: install iproute2")
    try:
        try:
            _ip("netns", "add", hub)
            _ip("-n", hub, "link", "add", "br0", "type", "bridge")
            _ip("netns", "exec", hub, "sh", "-c", _OWN_SHM)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces may be made here: {error.stderr.decode().strip()}")
        _ip("-n", hub, "link", "set", "br0", "up")
        for index, name in enumerate(names):
            _join(name, hub, f"{SUBNET}.{index + 1}")
        made: list[Host] = []
        for index, name in enumerate(names):
            home = directory / name
            home.mkdir()
            made.append(Host(name, hub, f"{SUBNET}.{index + 1}", home))
        yield made
    finally:
        for name in (*names, hub):
            subprocess.run([IP, "netns", "del", name], check=False, capture_output=True)


def _join(name: str, hub: str, address: str) -> None:
    _ip("netns", "add", name)
    _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", name, "netns", hub)
    _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    for namespace, link in ((name, "lo"), (name, "eth0"), (hub, name)):
        _ip("-n", namespace, "link", "set", link, "up")
    _ip("-n", hub, "link", "set", name, "master", "br0")


def _ip(*arguments: str) -> None:
    subprocess.run([IP, *arguments], check=True, capture_output=True)


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
