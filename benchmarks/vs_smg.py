"""Two failures of the SMG gateway, and what this one does in the same place.

Each gateway stands in front of two workers that only pretend to sample, and is asked in the same
way, over HTTP. (1) One worker is paused through `/v1/rl`: does anybody hang? (2) An update of the
weights reaches one worker only: which versions answer, and what does the list of workers say?

    make .venv-peers && python benchmarks/vs_smg.py --json
"""

import argparse
import asyncio
import json
import socket
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import uvloop

import rolloutbus
from benchmarks.side_processes import machine
from rolloutbus import WeightPublisher
from rolloutbus.errors import BusError

Json = dict[str, Any]
Reply = tuple[int, Any]
"""Status and JSON."""

SMG_PYTHON = Path(".venv-peers/bin/python")
MOCK = str(Path(__file__).with_name("mock_sglang.py"))
OK = 200
WAIT_S = 3.0
"""How long a caller waits for its answer here; in training it would be minutes."""
LONG_S = 30.0
START_S = 60.0
N_WORKERS = 2
BODY: Json = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}


@dataclass(frozen=True)
class Http:
    """Requests to one address."""

    url: str

    async def ask(self, path: str, body: Json | None = None, timeout_s: float = LONG_S) -> Reply:
        """Status and JSON; a GET without a body. Raises OSError, TimeoutError too."""
        return await asyncio.to_thread(self._asked, path, body, timeout_s)

    def _asked(self, path: str, body: Json | None, timeout_s: float) -> Reply:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers)  # noqa: S310 - ours
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")


@dataclass(frozen=True)
class Front:
    """A gateway with two workers behind it."""

    name: str
    http: Http
    update_one: Callable[[], Awaitable[str]]
    """Updates the weights so that the second worker does not get them; returns what was told."""

    async def workers(self) -> list[Json]:
        """Rows of `/v1/rl/workers`."""
        _, listed = await self.http.ask("/v1/rl/workers")
        return listed["workers"]

    async def has_all(self) -> bool:
        """Whether both workers are ready."""
        try:
            rows = await self.workers()
        except (OSError, KeyError):
            return False
        return sum(row["health"] == "ready" for row in rows) == N_WORKERS

    async def answers(self, n: int) -> list[str]:
        """Versions that answered `n` requests one after the other; `hung`: no answer in time."""
        return [await self._answer() for _ in range(n)]

    async def _answer(self) -> str:
        try:
            status, answer = await self.http.ask("/generate", BODY, WAIT_S)
        except TimeoutError:
            return "hung"
        return str(answer["meta_info"]["weight_version"]) if status == OK else f"status {status}"


async def _paused(front: Front, n: int) -> Json:
    """One worker is paused, the other is not."""
    first = (await front.workers())[0]["id"]
    engine = f"/v1/rl/workers/{first}/engine"
    await front.http.ask(f"{engine}/pause_generation", {"mode": "in_place"})
    try:
        answers = Counter(await front.answers(n))
        [row] = [row for row in await front.workers() if row["id"] == first]
    finally:
        await front.http.ask(f"{engine}/continue_generation", {})
    return {"requests": n, "hung": answers["hung"], "health_of_paused": row["health"]}


async def _half_updated(front: Front, n: int) -> Json:
    """One worker has the new weights, the other has not."""
    told = await front.update_one()
    answers = await front.answers(n)
    rows = [(row["weight_version"], row["health"]) for row in await front.workers()]
    return {
        "update": told,
        "answers": dict(Counter(answers)),
        "changes": sum(one != other for one, other in pairwise(answers)),
        "listed": rows,
    }


@asynccontextmanager
async def _smg(python: Path) -> AsyncGenerator[Front]:
    ports = [str(free_port()) for _ in range(N_WORKERS + 2)]
    workers = [f"http://127.0.0.1:{port}" for port in ports[:N_WORKERS]]
    where = ["--host", "127.0.0.1", "--port", ports[-2], "--worker-urls", *workers]
    more = ["--policy", "round_robin", "--enable-rl", "--prometheus-port", ports[-1]]
    async with AsyncExitStack() as stack:
        for command in (
            [sys.executable, MOCK, ports[0]],
            [sys.executable, MOCK, ports[1], "--refuses-updates"],
            [str(python), "-m", "smg.launch_router", *where, *more],
        ):
            await stack.enter_async_context(child(*command))
        http = Http(f"http://127.0.0.1:{ports[-2]}")

        async def update_one() -> str:
            path = "/v1/rl/engine/update_weights_from_disk?selector=engine%3Dsglang"
            status, told = await http.ask(path, {"model_path": "/ckpt", "weight_version": "2"})
            return f"status {status}, {told['succeeded']} of {told['total']} succeeded"

        yield Front("smg 1.13.0", http, update_one)


@asynccontextmanager
async def _rolloutbus(require: str) -> AsyncGenerator[Front]:
    async with (
        rolloutbus.up(workers=N_WORKERS, engine="fake", http=0) as fleet,
        rolloutbus.connect(fleet.address) as client,
    ):
        http = Http(fleet.http)
        publisher = WeightPublisher(client)
        await publisher.publish(_weights(1.0))

        async def update_one() -> str:
            """An engine that has given its weights up takes no new ones."""
            path = "/v1/rl/workers/w1/engine/release_memory_occupation"
            await http.ask(path, {"tags": ["weights"]})
            try:
                published = await publisher.publish(_weights(2.0), require=require)
            except BusError as error:
                return f"{type(error).__name__}: {error}"
            missed = "; ".join(f"{name}: {why}" for name, why in published.quarantined.items())
            return f"version {published.version} is committed; missed by {missed or 'nobody'}"

        yield Front(f"rolloutbus, require={require}", http, update_one)


def _weights(value: float) -> dict[str, torch.Tensor]:
    """What the fake engine has."""
    return {"embed.weight": torch.full((8, 4), value), "head.weight": torch.full((4,), value)}


@asynccontextmanager
async def child(*command: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A process that says nothing, killed at the end."""
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def free_port() -> int:
    """Find a TCP port that no program listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


async def _measured(n: int, smg_python: Path) -> list[Json]:
    rows: list[Json] = []
    for each in (_smg(smg_python), _rolloutbus("all"), _rolloutbus("any")):
        async with each as front:
            async with asyncio.timeout(START_S):
                while not await front.has_all():  # noqa: ASYNC110 - it is in another process
                    await asyncio.sleep(0.1)
            row: Json = {"gateway": front.name, "paused": await _paused(front, n)}
            rows.append({**row, "half_updated": await _half_updated(front, n)})
    return rows


def _table(rows: list[Json]) -> str:
    lines: list[str] = []
    for row in rows:
        paused, half = row["paused"], row["half_updated"]
        lines += [
            row["gateway"],
            f"  one worker paused: {paused['hung']} of {paused['requests']} requests hung",
            f"    it is listed as {paused['health_of_paused']}",
            f"  half an update: {half['update']}",
            f"    answers {half['answers']}; the version changed {half['changes']} times",
            f"    listed: {half['listed']}",
        ]
    return "\n".join(lines)


def main() -> None:
    """Ask both, and print what came."""
    parser = argparse.ArgumentParser(description="SMG and rolloutbus in the same two places.")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--smg", type=Path, default=SMG_PYTHON, help="a Python that has smg 1.13.0")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    if not options.smg.exists():
        parser.error(f"there is no {options.smg}: make .venv-peers, or name another Python")
    rows = uvloop.run(_measured(options.requests, options.smg))
    print(json.dumps({"machine": machine(), "gateways": rows}) if options.json else _table(rows))


if __name__ == "__main__":
    main()
