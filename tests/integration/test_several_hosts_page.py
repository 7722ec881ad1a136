"""A new user follows the page on several hosts, to the letter, on three hosts."""

import re
from asyncio.subprocess import Process
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rolloutbus.examples.tiny_model import build_tiny_model
from tests.integration.hosts import START_S, Host, ended, hosts
from tests.page_snippets import Snippet, snippets_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(8 * START_S)]

PAGE = "docs/several_hosts.md"
N_HOSTS, N_COMMANDS = 2, 6
"""At most so many commands for two hosts with keys."""
TYPED = re.compile(r"^([ABC])\$ (.*)$")
SERVERS = {"up": "Stop with Ctrl-C", "worker": '"ready"'}
"""Commands that go on until Ctrl-C -> what they print once they run."""
TOKEN = re.compile(r"\b(TOKEN|rolloutbus-[\w-]+…)")
OUTER_ADDRESS = "203.0.113.7"
"""Of host B, to others, in the page's part on translated addresses."""
PROGRAM = "import asyncio, rolloutbus\nasync def main():\n{}\nasyncio.run(main())"

STREAM = """
    sampling = rolloutbus.SamplingParams(max_new_tokens=64, ignore_eos=True)
    n_deltas = 0
    while n_deltas < 2:  # a subscription takes effect some time after it is made
        deltas = client.stream([1, 4, 2], sampling, worker="host-b", deadline_s=60.0)
        n_deltas = len([delta async for delta in deltas])
    streams = {each.name: each.stream for each in client.connection.members}
    print(streams["host-b"], n_deltas)
"""


class Reader:
    """Types what the page says, each command at its host; a token is the one that was printed."""

    def __init__(self, all_hosts: list[Host], servers: AsyncExitStack) -> None:
        self._hosts = dict(zip("ABC", all_hosts, strict=True))
        self._servers = servers
        self._workers: dict[Host, Process] = {}
        self._token = ""
        self.n_typed = 0

    async def type_in(self, snippet: Snippet) -> str:
        """All commands of a block; returns what the last one printed."""
        shown = ""
        for line in snippet.code.replace("\\\n", "").splitlines():
            if found := TYPED.match(line):
                shown = await self._run(self._hosts[found[1]], found[2])
                self.n_typed += 1
            elif line and not TOKEN.match(line):  # what the page says that is printed
                assert line in shown.splitlines()
        return shown

    async def _run(self, host: Host, command: str) -> str:
        typed = ("bash", "-c", TOKEN.sub(self._token, command))
        if until := SERVERS.get(command.split()[1]):
            if host in self._workers:
                await ended(self._workers.pop(host))  # it has the name of the next one
            process = await self._servers.enter_async_context(host.running(until, *typed))
            self._workers[host] = process
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
    own = [each for each in snippets_of(PAGE) if Path(__file__).name in each.not_run]
    fleet, trainer, program, translated = own
    async with AsyncExitStack() as servers:
        reader = Reader(all_hosts, servers)
        await reader.type_in(fleet)
        assert reader.n_typed <= N_COMMANDS
        shown = await reader.type_in(trainer)
        assert all(name in shown for name in ("w0", "host-b"))
        await run_program(all_hosts[-1], program.code)
        all_hosts[1].add_address(OUTER_ADDRESS, seen_by=(all_hosts[0], all_hosts[2]))
        await reader.type_in(translated)
        said = await run_program(all_hosts[-1], program.code.replace("...", STREAM.strip()))
        stream, n_deltas = said.split()[-2:]
        assert stream.startswith(f"tcp://{OUTER_ADDRESS}:")
        assert int(n_deltas) > 1  # without the stream there would be one, with the result


async def run_program(host: Host, code: str) -> str:
    """What a program prints that has this in an async function."""
    indented = "".join(f"    {line}\n" for line in code.splitlines())
    status, said = await host.run("python", "-c", PROGRAM.format(indented))
    assert status == 0, said
    return said
