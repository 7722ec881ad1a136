"""A gateway as a user starts it, and plain HTTP requests to it."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any

from rolloutbus.launcher.plan import environment
from tests.integration.live_fleet import DEADLINE_S, START_S, serves_at

Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What a request got."""

    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def json(self) -> Any:  # noqa: ANN401 - whatever an endpoint answers
        return json.loads(self.body)

    @property
    def events(self) -> list[Json]:
        """Of server-sent events, without `[DONE]`."""
        lines = self.body.decode().split("\n\n")
        told = [line.removeprefix("data: ") for line in lines if line]
        assert told[-1] == "[DONE]", told[-1]
        return [json.loads(line) for line in told[:-1]]


@dataclass(frozen=True)
class Gateway:
    """One that runs."""

    process: asyncio.subprocess.Process
    url: str

    async def open(
        self,
        method: str,
        path: str,
        body: bytes,
        length: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request; its answer is to be read."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        n_bytes = len(body) if length is None else length
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        writer.write(f"{head}{more}Content-Length: {n_bytes}\r\n\r\n".encode() + body)
        return reader, writer

    async def ask(
        self,
        method: str,
        path: str,
        body: Json | bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """The whole answer; it may take the start of a process."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with asyncio.timeout(START_S):
            reader, writer = await self.open(method, path, sent, headers=headers)
            with closing(writer):
                return await _reply(reader)

    async def end(self) -> int:
        """Ctrl-C; its exit status."""
        self.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()


async def _reply(reader: asyncio.StreamReader) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    pairs = (line.partition(":") for line in head[1:] if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    if headers.get("transfer-encoding") == "chunked":
        content = b"".join([piece async for piece in _chunks(reader)])
    else:
        content = await reader.read()
    return Reply(int(head[0].split()[1]), headers, content)


async def _chunks(reader: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    while n_bytes := int(await reader.readline(), 16):
        yield (await reader.readexactly(n_bytes + 2))[:-2]


@asynccontextmanager
async def gateway(*arguments: str, command: str = "gateway") -> AsyncGenerator[Gateway]:
    """Start `rolloutbus gateway` at a free port; it is killed at the end.

    It logs no traceback, and no error that nobody reads.
    """
    with TemporaryFile() as log:
        async with _started(log, command, *arguments) as running:
            yield running
        log.seek(0)
        said = log.read().decode()
    assert "Traceback" not in said, said
    assert "never retrieved" not in said, said


@asynccontextmanager
async def _started(log: IO[bytes], command: str, *arguments: str) -> AsyncGenerator[Gateway]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "rolloutbus.cli.main", command, "--port", "0", *arguments),
        stdout=PIPE,
        stderr=log,
        env=environment(),
    )
    try:
        try:
            endpoints = await serves_at(process)
        except AssertionError as error:
            log.seek(0)
            raise AssertionError(log.read().decode()) from error
        yield Gateway(process, endpoints["http"])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
