"""A new user follows the page on several hosts, to the letter, on three hosts."""

import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rolloutbus.examples.tiny_model import build_tiny_model
from tests.integration.hosts import Host, hosts
from tests.page_snippets import Snippet, snippets_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PAGE = "docs/several_hosts.md"
N_HOSTS, N_COMMANDS = 2, 6
"""At most so many commands for two hosts with keys."""
TYPED = re.compile(r"^([ABC])\$ (.*)$")
SERVERS = {"up": "Stop with Ctrl-C", "worker": '"ready"'}
"""Commands that go on until Ctrl-C -> what they print once they run."""
TOKEN = re.compile(r"\b(TOKEN|rolloutbus-[\w-]+…)")
PROGRAM = "import asyncio, rolloutbus\nasync def main():\n{}\nasyncio.run(main())"


class Reader:
    """Types what the page says, each command at its host; a token is the one that was printed."""

    def __init__(self, all_hosts: list[Host], servers: AsyncExitStack) -> None:
        self._hosts = dict(zip("ABC", all_hosts, strict=True))
        self._servers = servers
        self._token = ""
        self.n_typed = 0

    async def type_in(self, snippet: Snippet) -> str:
        """All commands of a block; returns what the last one printed."""
        shown = ""
        for line in snippet.code.splitlines():
            if found := TYPED.match(line):
                shown = await self._run(self._hosts[found[1]], found[2])
                self.n_typed += 1
            elif line and not TOKEN.match(line):  # what the page says that is printed
                assert line in shown.splitlines()
        return shown

    async def _run(self, host: Host, command: str) -> str:
        typed = ("bash", "-c", TOKEN.sub(self._token, command))
        if until := SERVERS.get(command.split()[1]):
            await self._servers.enter_async_context(host.running(until, *typed))
            return ""
        status, shown = await host.run(*typed)
        assert status == 0, f"{command}\n{shown}"
        if " invite " in command:
            self._token = shown.strip()
        return shown.strip()


@pytest.fixture
def all_hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """A, B and C of the page; each has the model."""
    build_tiny_model(tmp_path / "model", seed=0)
    with hosts(3, tmp_path) as made:
        for each in made:
            (each.home / "model").symlink_to(tmp_path / "model")
        yield made


async def test_the_page_makes_a_fleet_of_two_hosts_and_a_trainer(
    all_hosts: list[Host], *, is_exhaustive: bool
) -> None:
    if not is_exhaustive:
        pytest.skip("starts two engines: `make nightly`, or --exhaustive")
    fleet, trainer, program, *_ = [each for each in snippets_of(PAGE) if each.not_run]
    async with AsyncExitStack() as servers:
        reader = Reader(all_hosts, servers)
        await reader.type_in(fleet)
        assert reader.n_typed <= N_COMMANDS
        shown = await reader.type_in(trainer)
        assert all(name in shown for name in ("w0", "host-b"))
        code = PROGRAM.format("".join(f"    {line}\n" for line in program.code.splitlines()))
        status, said = await all_hosts[-1].run("python", "-c", code)
        assert status == 0, said
