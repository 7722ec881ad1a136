"""What a gateway costs: requests a second per core, and time to the first token.

The gateway of the bus, SMG and sglang-router take turns in front of two engines that give every
request one token a step. Behind the bus these are fake engines, behind the others servers that
speak SGLang's HTTP, with steps of the same length. Two measurements each: closed loops with a
number of requests in flight, which tell the CPU time that each process takes for a request; and
streams at a modest rate, which tell the time to the first token. The client is this process and
counts for nobody.

What stands in front of the engines is compared: gateway and router of the bus, which are two
processes, against the one process of the others.

    make .venv-peers && python -m benchmarks.gateway_rates --json
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import uvloop
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import rolloutbus
from benchmarks.command_path import count, seconds_of
from benchmarks.side_processes import machine
from benchmarks.vs_smg import MOCK, SMG_PYTHON, child, free_port

Json = dict[str, Any]

N_WORKERS = 2
N_TOKENS = 8
STEP_S = 0.002
SLOTS = 512
START_S = 60.0
ANSWER_S = 60.0
IN_FLIGHT = (1, 16, 64, 256)
MODES = ("plain", "stream")
OURS = "rolloutbus"
PEERS = {
    "smg": "smg.launch_router",
    "sglang-router": "sglang_router.launch_router",
}
"""Name -> module that starts it."""
FRONT = ("gateway", "router")
"""Roles of processes that stand before the engines."""


@dataclass(frozen=True)
class Front:
    """A gateway that runs."""

    name: str
    port: int
    pids: Mapping[str, Sequence[int]]
    """Role -> its processes."""

    def cpu_s(self) -> dict[str, float]:
        """By role, so far."""
        return {role: sum(map(cpu_s_of, pids)) for role, pids in self.pids.items()}


def cpu_s_of(pid: int) -> float:
    """Of all threads, in nanoseconds' steps; `stat` counts in hundredths of a second."""
    found = 0
    for each in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):
            found += int(each.read_text().split()[0])
    return found / 1e9


@asynccontextmanager
async def _bus(model: Path) -> AsyncGenerator[Front]:
    options = {"slots": SLOTS, "step_s": STEP_S}
    async with rolloutbus.up(
        engine="fake", model=model, workers=N_WORKERS, store=False, http=0, engine_options=options
    ) as fleet:
        pids = fleet.pids
        workers = [pid for name, pid in pids.items() if name not in FRONT]
        for name in list(pids):
            if name not in FRONT:
                workers += fleet.host_pids(name)
        roles = {"gateway": [pids["gateway"]], "router": [pids["router"]], "engines": workers}
        yield Front(OURS, int(fleet.http.rpartition(":")[2]), roles)


@asynccontextmanager
async def _peer(name: str, python: Path) -> AsyncGenerator[Front]:
    engines = [free_port() for _ in range(N_WORKERS)]
    port = free_port()
    urls = [f"http://127.0.0.1:{each}" for each in engines]
    where = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
    more = ["--policy", "round_robin", "--log-level", "error"]
    metrics = ["--prometheus-port", str(free_port())]
    async with AsyncExitStack() as stack:
        begun = [
            await stack.enter_async_context(
                child(sys.executable, MOCK, str(each), "--step-s", str(STEP_S))
            )
            for each in engines
        ]
        launch = [str(python), "-m", PEERS[name], *where, *more, *metrics]
        gateway = await stack.enter_async_context(child(*launch))
        roles = {"gateway": [gateway.pid], "engines": [each.pid for each in begun]}
        yield Front(name, port, roles)


def _write_tokenizer(directory: Path) -> None:
    """A word for each token of the fake engine."""
    vocabulary = {f"w{token}": token for token in range(32_000)}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="w0"))  # noqa: S106
    )
    made.save_pretrained(directory)  # pyright: ignore[reportUnknownMemberType]


class Answered(NamedTuple):
    """A request that has its answer."""

    first_s: float
    """Until the first bytes of its body."""
    n_events: int
    """Of a stream."""


class Connection(asyncio.Protocol):
    """One HTTP connection, which is kept; the client does next to nothing."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._read = bytearray()
        self._done: asyncio.Future[Answered] | None = None
        self._begun_at = self._first_s = 0.0

    @classmethod
    async def to(cls, port: int) -> "Connection":
        """Connect."""
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(cls, "127.0.0.1", port)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"the gateway closed: {exc}"))

    def close(self) -> None:
        """Disconnect."""
        assert self._transport is not None
        self._transport.close()

    async def ask(self, request: bytes) -> Answered:
        """Send a request and wait for all of its answer; ConnectionError: it has none."""
        assert self._transport is not None
        self._read.clear()
        self._first_s = 0.0
        self._begun_at = time.perf_counter()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(ANSWER_S):
            return await self._done

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        read = self._read
        read += data
        head_end = read.find(b"\r\n\r\n")
        if head_end < 0 or len(read) == head_end + 4:
            return
        self._first_s = self._first_s or time.perf_counter() - self._begun_at
        head = bytes(read[:head_end]).lower()
        _, is_whole, length = head.partition(b"content-length:")
        if is_whole:
            ended = len(read) - head_end - 4 >= int(length.split(b"\r\n", 1)[0])
        else:
            ended = read.endswith(b"0\r\n\r\n")
        if not ended:
            return
        assert self._done is not None
        n_events = read.count(b"data: ") - 1
        is_ok = head.startswith(b"http/1.1 200") and (is_whole or b"data: [DONE]" in read)
        if is_ok:
            self._done.set_result(Answered(self._first_s, n_events))
        else:
            self._done.set_exception(ConnectionError(bytes(read[:500]).decode()))


def _request(front: Front, endpoint: str, mode: str) -> bytes:
    body: Json = {"stream": True} if mode == "stream" else {}
    if endpoint == "/generate":
        sampling = {"max_new_tokens": N_TOKENS, "ignore_eos": True}
        body |= {"input_ids": [1, 2, 3], "sampling_params": sampling}
    else:
        model = "default" if front.name == OURS else "mock"
        body |= {"model": model, "prompt": [1, 2, 3], "max_tokens": N_TOKENS, "ignore_eos": True}
    encoded = json.dumps(body).encode()
    head = f"POST {endpoint} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(encoded)}\r\n\r\n".encode() + encoded


async def _loops(front: Front, request: bytes, in_flight: int, seconds: float) -> Json:
    """Closed loops: what the processes took for a request."""
    connections = [await Connection.to(front.port) for _ in range(in_flight)]
    n_answered = 0
    before, begun_at = front.cpu_s(), time.perf_counter()

    async def ask(connection: Connection) -> None:
        nonlocal n_answered
        while time.perf_counter() - begun_at < seconds:
            await connection.ask(request)
            n_answered += 1

    await asyncio.gather(*map(ask, connections))
    elapsed_s, after = time.perf_counter() - begun_at, front.cpu_s()
    for connection in connections:
        connection.close()
    cpu_us = {role: 1e6 * (after[role] - before[role]) / n_answered for role in after}
    return {
        "requests_per_s": n_answered / elapsed_s,
        "cpu_us": cpu_us,
        "front_us": sum(cpu_us[role] for role in FRONT if role in cpu_us),
    }


async def _first_tokens(front: Front, request: bytes, rate: float, seconds: float) -> list[float]:
    """Milliseconds of streams that begin at equal distances."""
    n = max(2, round(rate * seconds))
    connections = [await Connection.to(front.port) for _ in range(min(n, 64))]
    begun_at = time.perf_counter()

    async def ask(number: int) -> float:
        await asyncio.sleep(max(0.0, begun_at + number / rate - time.perf_counter()))
        connection = connections.pop()
        answered = await connection.ask(request)
        connections.append(connection)
        return 1e3 * answered.first_s

    found = await asyncio.gather(*map(ask, range(n)))
    for connection in connections:
        connection.close()
    return found


@dataclass
class Seen:
    """What all rounds saw."""

    loops: dict[tuple[str, int], dict[str, list[Json]]] = field(
        default_factory=dict[tuple[str, int], dict[str, list[Json]]]
    )
    """(mode, in flight) -> name of the gateway -> by round."""
    first_ms: dict[str, list[list[float]]] = field(default_factory=dict[str, list[list[float]]])
    """Name of the gateway -> by round."""


async def _round(fronts: Sequence[Front], seen: Seen, options: argparse.Namespace) -> None:
    path = f"/{options.endpoint}"
    for mode in MODES:
        for in_flight in options.in_flight:
            cell = seen.loops.setdefault((mode, in_flight), {})
            for front in fronts:
                request = _request(front, path, mode)
                found = await _loops(front, request, in_flight, options.seconds)
                cell.setdefault(front.name, []).append(found)
    for front in fronts:
        request = _request(front, path, "stream")
        found = await _first_tokens(front, request, options.rate, options.first_seconds)
        seen.first_ms.setdefault(front.name, []).append(found)


async def _serves(front: Front, path: str) -> None:
    async with asyncio.timeout(START_S):
        while True:
            with suppress(OSError):
                connection = await Connection.to(front.port)
                await connection.ask(_request(front, path, "stream"))
                connection.close()
                return
            await asyncio.sleep(0.1)


async def _measured(options: argparse.Namespace) -> Json:
    seen = Seen()
    async with AsyncExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rb-")))
        _write_tokenizer(model)
        fronts = [await stack.enter_async_context(_bus(model))]
        for name in options.peers:
            python = options.smg if name == "smg" else options.sglang_router
            fronts.append(await stack.enter_async_context(_peer(name, python)))
        for front in fronts:
            await _serves(front, f"/{options.endpoint}")
        for turn in range(options.rounds):
            await _round(fronts if turn % 2 else fronts[::-1], seen, options)
    return _report(seen, options)


def _report(seen: Seen, options: argparse.Namespace) -> Json:
    rates = [
        {"mode": mode, "in_flight": in_flight, "gateway": name, **_rate(runs, cell)}
        for (mode, in_flight), cell in seen.loops.items()
        for name, runs in cell.items()
    ]
    first = [
        {"gateway": name, **_first(runs, seen.first_ms.get("smg"))}
        for name, runs in seen.first_ms.items()
    ]
    endpoint = f"/{options.endpoint}"
    return {"endpoint": endpoint, "rates": rates, "first_token": first, "machine": machine()}


def _rate(runs: list[Json], cell: Mapping[str, list[Json]]) -> Json:
    """Medians over the rounds; `of_smg`: requests per CPU second of all in front, of SMG's."""
    row: Json = {
        "requests_per_s": round(statistics.median(run["requests_per_s"] for run in runs), 1),
        "requests_per_cpu_s": round(1e6 / statistics.median(run["front_us"] for run in runs)),
        "cpu_us": {
            role: round(statistics.median(run["cpu_us"][role] for run in runs), 1)
            for role in runs[0]["cpu_us"]
        },
    }
    if "smg" in cell:
        pairs = zip(cell["smg"], runs, strict=True)
        ratios = [theirs["front_us"] / ours["front_us"] for theirs, ours in pairs]
        row["of_smg"] = round(statistics.median(ratios), 3)
    return row


def _first(runs: list[list[float]], smg: list[list[float]] | None) -> Json:
    row: Json = {}
    for name, at in (("p50_ms", 0.5), ("p99_ms", 0.99)):
        found = [_quantile(run, at) for run in runs]
        row[name] = round(statistics.median(found), 2)
        if smg is not None:
            pairs = zip(found, (_quantile(run, at) for run in smg), strict=True)
            more = statistics.median(ours - theirs for ours, theirs in pairs)
            row[f"{name}_over_smg"] = round(more, 2)
    return row


def _quantile(values: Sequence[float], at: float) -> float:
    return sorted(values)[min(len(values) - 1, int(at * len(values)))]


def _table(report: Json) -> str:
    lines = [f"{report['endpoint']}, {N_TOKENS} tokens, steps of {1e3 * STEP_S:g} ms"]
    for row in report["rates"]:
        cpu = ", ".join(f"{role} {us:.0f}" for role, us in row["cpu_us"].items())
        lines.append(
            f"{row['mode']:6} {row['in_flight']:4} {row['gateway']:14}"
            f"{row['requests_per_s']:8.0f} requests/s{row['requests_per_cpu_s']:8} per CPU second"
            f"  of smg {row.get('of_smg', '-'):6}  CPU us: {cpu}"
        )
    lines += [f"first token: {row}" for row in report["first_token"]]
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Requests per core, and first tokens.")
    parser.add_argument("--endpoint", choices=["generate", "v1/completions"], default="generate")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=["smg"])
    parser.add_argument("--in-flight", type=count, nargs="+", default=IN_FLIGHT)
    parser.add_argument("--seconds", type=seconds_of, default=0.4, help="of a closed loop")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--rate", type=count, default=20, help="streams a second")
    parser.add_argument(
        "--first-seconds", type=seconds_of, default=2.0, help="of these, in a round"
    )
    parser.add_argument("--smg", type=Path, default=SMG_PYTHON, help="a Python that has smg 1.13.0")
    parser.add_argument(
        "--sglang-router", type=Path, default=SMG_PYTHON, help="a Python that has sglang-router"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    for name in options.peers:
        python = options.smg if name == "smg" else options.sglang_router
        if not python.exists():
            parser.error(f"there is no {python}: make .venv-peers, or name another Python")
    return options


def main() -> None:
    """Measure and print."""
    options = _options()
    report = uvloop.run(_measured(options))
    print(json.dumps(report) if options.json else _table(report))


if __name__ == "__main__":
    main()
