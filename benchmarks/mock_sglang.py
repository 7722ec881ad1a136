"""An HTTP server that answers as an SGLang server does, without a model; for benchmarks.

Like the fake engine it gives every request one token a step, and a step costs what it is told. Like
SGLang it holds requests while it is paused and says at `/health` that it is well.
"""

import argparse
import asyncio
import json
import re
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import uvloop

Json = dict[str, Any]

TOKEN = 7
TEXT = " w"
HEAD = b"HTTP/1.1 %d OK\r\nContent-Type: %s\r\n"
LENGTH = re.compile(rb"(?i)content-length: *(\d+)")


class Engine:
    """One engine that only pretends to sample."""

    def __init__(self, *, step_s: float, refuses_updates: bool) -> None:
        self.refuses_updates = refuses_updates
        self.version = "1"
        self.runs = asyncio.Event()
        self.runs.set()
        self._step_s = step_s
        self._steps_of: set[asyncio.Queue[None]] = set()
        """One for each request that runs."""
        self._has_work = asyncio.Event()

    @property
    def facts(self) -> Json:
        """Of every endpoint that asks what this is."""
        return {
            "model_path": "mock",
            "served_model_name": "mock",
            "tp_size": 1,
            "dp_size": 1,
            "version": "0.5.17",
            "is_generation": True,
            "weight_version": self.version,
            "object": "list",
            "data": [{"id": "mock", "object": "model", "owned_by": "sglang"}],
        }

    async def run(self) -> None:
        """Step for as long as there is something to do."""
        while True:
            await self._has_work.wait()
            await self.runs.wait()
            await asyncio.sleep(self._step_s)
            for steps in self._steps_of:
                steps.put_nowait(None)

    async def counts(self, n_tokens: int) -> AsyncGenerator[int]:
        """How many tokens a request has after each of its steps."""
        steps: asyncio.Queue[None] = asyncio.Queue()
        self._steps_of.add(steps)
        self._has_work.set()
        try:
            for n in range(1, n_tokens + 1):
                await steps.get()
                yield n
        finally:
            self._steps_of.discard(steps)
            if not self._steps_of:
                self._has_work.clear()

    def sample(self, n: int, n_tokens: int) -> Json:
        """A reply of `/generate` after `n` tokens of so many."""
        meta = {
            "id": secrets.token_hex(8),
            "finish_reason": {"type": "length", "length": n} if n == n_tokens else None,
            "prompt_tokens": 3,
            "completion_tokens": n,
            "weight_version": self.version,
        }
        return {"text": "", "output_ids": [TOKEN] * n, "meta_info": meta}

    def completion(self, n: int, n_tokens: int) -> Json:
        """A reply of `/v1/completions`, or its part of the newest token."""
        end = "length" if n == n_tokens else None
        choice = {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": end}
        return {
            "id": secrets.token_hex(8),
            "object": "text_completion",
            "created": 0,
            "model": "mock",
            "choices": [choice],
        }


class Server:
    """Answers connections for an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith((b"GET ", b"POST ")):
                    break  # some ask first whether this is gRPC
                method, path, _ = head.split(b" ", 2)
                length = LENGTH.search(head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                asked = json.loads(body or b"{}")
                if method == b"POST":
                    await self._post(path.decode(), asked, writer)
                else:
                    _send(writer, 200, self._engine.facts)
                await writer.drain()
        writer.close()

    async def _post(self, path: str, body: Json, writer: asyncio.StreamWriter) -> None:
        engine = self._engine
        match path:
            case "/generate":
                n_tokens = body["sampling_params"]["max_new_tokens"]
                await self._generated(
                    engine.sample, n_tokens, writer, is_stream=bool(body.get("stream"))
                )
            case "/v1/completions":
                n_tokens, is_stream = body["max_tokens"], bool(body.get("stream"))
                await self._generated(engine.completion, n_tokens, writer, is_stream=is_stream)
            case "/update_weights_from_disk" if engine.refuses_updates:
                _send(writer, 400, {"success": False, "message": "no such directory"})
            case "/update_weights_from_disk":
                engine.version = body["weight_version"]
                _send(writer, 200, {"success": True, "message": "Succeeded"})
            case "/pause_generation":
                engine.runs.clear()
                _send(writer, 200, {"status": "ok"})
            case _:
                engine.runs.set()
                _send(writer, 200, {"status": "ok"})

    async def _generated(
        self,
        told: Callable[[int, int], Json],
        n_tokens: int,
        writer: asyncio.StreamWriter,
        *,
        is_stream: bool,
    ) -> None:
        counts = self._engine.counts(n_tokens)
        if not is_stream:
            async for _ in counts:
                pass
            _send(writer, 200, told(n_tokens, n_tokens))
            return
        writer.write(HEAD % (200, b"text/event-stream") + b"Transfer-Encoding: chunked\r\n\r\n")
        async for n in counts:
            _send_event(writer, json.dumps(told(n, n_tokens)).encode())
            await writer.drain()
        _send_event(writer, b"[DONE]")
        writer.write(b"0\r\n\r\n")


def _send(writer: asyncio.StreamWriter, status: int, content: Json) -> None:
    encoded = json.dumps(content).encode()
    head = HEAD % (status, b"application/json")
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(encoded) + encoded)


def _send_event(writer: asyncio.StreamWriter, content: bytes) -> None:
    event = b"data: " + content + b"\n\n"
    writer.write(b"%x\r\n" % len(event) + event + b"\r\n")


async def _serve(options: argparse.Namespace) -> None:
    engine = Engine(step_s=options.step_s, refuses_updates=options.refuses_updates)
    server = await asyncio.start_server(Server(engine).answer, "127.0.0.1", options.port)
    async with server:
        await engine.run()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="A server that answers as SGLang does.")
    parser.add_argument("port", type=int)
    parser.add_argument("--step-s", type=float, default=0.0, help="what a step costs")
    parser.add_argument("--refuses-updates", action="store_true")
    uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
