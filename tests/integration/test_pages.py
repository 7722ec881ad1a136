"""What the pages show works: each block of Python, and each command, on one small live fleet."""

import asyncio
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus import Fleet, SamplingParams
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model
from rolloutbus.launcher.plan import environment
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.live_fleet import DEADLINE_S, PATIENT, START_S, STEADY_HOST
from tests.page_snippets import PYTHON, Snippet, pages, run_python, snippets_of, words_of

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {
    "workers": 1,
    "engine_options": {"threads": 1, "slots": 8},
    "tap": True,
    "http": 0,
    "http_options": {"default_max_tokens": 16},
    "lease": PATIENT,
    "host": STEADY_HOST,
}
ADDRESS, GATEWAY = "tcp://127.0.0.1:7777", "http://127.0.0.1:8000"
"""Those of the reader's fleet, on every page."""
ANOTHER_FLEET = "rolloutbus.up("
FRONT_DOOR = "README.md"
"""Its blocks bring their fleet up at each commit; those of other pages in `make nightly`."""
SERVERS = {
    "up": b"Stop with Ctrl-C",
    **dict.fromkeys(("gateway", "record", "forward", "metrics", "top", "replay", "tail"), b"\n"),
}
"""Commands that go on until Ctrl-C, at least with some options -> what they print once they run."""
SHORTER = ("n_steps = 60", "n_steps = 2")
"""Of the tutorial: what it says, and what is enough here."""
CONSOLE = frozenset({"console"})
"""Lines of curl are `sh`: test_gateway_page.py."""
STARTS_ITS_OWN = re.compile(r"^\$ rolloutbus (up|demo)\b", re.MULTILINE)


def pages_with(languages: frozenset[str]) -> list[str]:
    return [
        page
        for page in pages()
        if any(each.language in languages and not each.not_run for each in snippets_of(page))
    ]


@pytest.fixture(scope="module", autouse=True)
def own_runtime_dir() -> Iterator[None]:
    """Commands find this module's fleet, and no other."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="rb-") as path:
        patch.setenv("XDG_RUNTIME_DIR", path)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's `./model`."""
    directory = tmp_path_factory.mktemp("reader") / "model"
    build_tiny_model(directory, seed=0)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[rolloutbus.RolloutClient]:
    """A reader's; on a busy machine it waits longer for what comes late, the ends of requests with
    a page's short deadline among it."""
    settings = ClientSettings(
        name="reader",
        router=fleet.address,
        lease=PATIENT,
        connect_timeout_s=DEADLINE_S,
        control_deadline_s=DEADLINE_S,
        overtime_s=DEADLINE_S,
    )
    async with rolloutbus.RolloutClient(settings) as connected:
        yield connected


@pytest.mark.parametrize("page", pages_with(PYTHON))
async def test_python_of_a_page_runs(
    page: str,
    fleet: Fleet,
    client: rolloutbus.RolloutClient,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_exhaustive: bool,
) -> None:
    monkeypatch.chdir(tiny_model.parent)
    names = what_a_reader_has(client, tiny_model)
    for snippet in snippets_of(page):
        if snippet.language not in (*PYTHON, "given") or snippet.not_run:
            continue
        if ANOTHER_FLEET in snippet.code and not is_exhaustive and page != FRONT_DOOR:
            continue
        async with asyncio.timeout(2 * START_S):  # it may start a fleet
            await run_python(snippet, as_typed(snippet, fleet), names)
        if ANOTHER_FLEET in snippet.code:
            names["client"] = client  # the block's own has ended with its fleet


def what_a_reader_has(client: rolloutbus.RolloutClient, model: Path) -> dict[str, Any]:
    """The names that every page may take for granted."""
    return {
        "rolloutbus": rolloutbus,
        "SamplingParams": SamplingParams,
        "asyncio": asyncio,
        "client": client,
        "publisher": rolloutbus.WeightPublisher(client),
        "model": load_tiny_model(model),
        "prompt": [1, 2, 3],
        "prompts": [[1, 2, 3], [4, 5]],
        "sampling": SamplingParams(max_new_tokens=4),
    }


def as_typed(snippet: Snippet, fleet: Fleet) -> str:
    """What a reader of this fleet would type."""
    text = snippet.code.replace(ADDRESS, fleet.address).replace(GATEWAY, fleet.http)
    text = text.replace('"ADDRESS"', f'"{fleet.address}"')
    text = text.replace("path/of/config", "./model")
    return text.replace(*SHORTER).replace("path/to/model", "./model")


@pytest.fixture
def directory(tiny_model: Path) -> Iterator[Path]:
    """Where a reader types; below tmp_path the paths of a fleet's sockets were too long."""
    with tempfile.TemporaryDirectory(prefix="rb-") as path:
        (Path(path) / "model").symlink_to(tiny_model)
        yield Path(path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("page", pages_with(CONSOLE))
async def test_commands_of_a_page_do_what_they_say(
    page: str, fleet: Fleet, directory: Path
) -> None:
    for snippet in snippets_of(page):
        if snippet.commands and not snippet.not_run:
            async with AsyncExitStack() as servers:
                await type_in(snippet, fleet, directory, servers)


async def type_in(snippet: Snippet, fleet: Fleet, directory: Path, servers: AsyncExitStack) -> None:
    """Type a block's commands in this directory, one after the other."""
    variables = dict(environment())
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
    variables["XDG_RUNTIME_DIR"] = os.environ["XDG_RUNTIME_DIR"]
    address, http = fleet.address, fleet.http
    if STARTS_ITS_OWN.search(snippet.code):
        variables["XDG_RUNTIME_DIR"] = str(directory)
        address = f"tcp://127.0.0.1:{held_port(servers)}"
        http = f"http://127.0.0.1:{held_port(servers)}"
    exports = ""
    for command in snippet.commands:
        text = command.replace(ADDRESS, address).replace(GATEWAY, http)
        text = text.replace("--http 8000", f"--http {http.rpartition(':')[2]}")
        text = text.replace("--port 9464", "--port 0")
        if "jq " in text and shutil.which("jq") is None:
            continue
        if text.startswith(("export ", "cd ")):
            exports += f"{text.partition('#')[0]}\n"
            continue
        words = words_of(text)
        where = f"{snippet.place}: {command}"
        running = typed(f"{exports}{text}", where, directory, variables)
        if words[0] == "rolloutbus" and words[1] in SERVERS and "--once" not in words:
            process = await servers.enter_async_context(running)
            await has_said(SERVERS[words[1]], process, where)
        else:
            async with running as process, asyncio.timeout(START_S):
                await process.wait()


async def has_said(words: bytes, process: asyncio.subprocess.Process, where: str) -> None:
    """Wait for a line with these words."""
    assert process.stdout is not None
    said = b""
    async with asyncio.timeout(START_S):
        while words not in said:
            line = await process.stdout.readline()
            said += line
            assert line, f"{where}: it ended\n{said.decode()}"


def held_port(holders: AsyncExitStack) -> int:
    """A port that is free, and that nobody else gets before `holders` are closed."""
    holder = holders.enter_context(socket.socket())
    holder.bind(("127.0.0.1", 0))
    # From now on a server that says the same may listen there, if it knows the number.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder.getsockname()[1]


@asynccontextmanager
async def typed(
    text: str, where: str, directory: Path, variables: dict[str, str]
) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A shell that runs it; what still runs at the end gets Ctrl-C, and takes it well."""
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", text),
        cwd=directory,
        env=variables,
        stdout=PIPE,
        stderr=STDOUT,
        start_new_session=True,
    )
    try:
        yield process
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGINT)
        async with asyncio.timeout(START_S):
            said, _ = await process.communicate()
        assert process.returncode in (0, 130, -signal.SIGINT), f"{where}\n{said.decode()}"
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
