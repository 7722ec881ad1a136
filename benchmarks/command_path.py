"""What does a command cost from end to end, and what would it cost over what others would pick?

A client process sends commands of about 200 bytes through a router process to eight worker
processes, which answer at once with as many. Beside `rolloutbus` stand a router written plainly
with `zmq.asyncio`, NATS, Ray actors, gRPC and HTTP (FastAPI; asked by httpx, and by aiohttp), all
in the same run and in turns, so that other work on the machine slows them alike: ratios count. Each
has as many commands in flight as it is told, one caller for each. CPU is that of all processes.

`ports` is the bus without `RolloutClient`: what the client costs is the distance between the two.
Only the bus has heartbeats, leases, deadlines and resends; Ray has no process between client and
worker, and NATS a server that is not written in Python. Gateways for engines (SMG, sglang-router)
speak of tokens over HTTP: see `vs_smg.py`.

    python -m benchmarks.command_path                        # all paths, two to four minutes
    python -m benchmarks.command_path --peers zmq,nats --in-flight 256 --rounds 9
    python -m benchmarks.command_path --peers grpc --workers 2 --seconds 1 --json

`make .venv-bench/.installed` makes the environment of Ray, gRPC, NATS and HTTP, and
`apt install nats-server` brings the server of NATS. What is missing is said in the table; if
`--peers` names it, nothing is measured.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import IO, Any

import uvloop

from benchmarks.side_processes import machine
from rolloutbus.bus.wire.near_names import nearest
from rolloutbus.launcher.plan import environment

Json = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv-bench"
OURS = "rolloutbus"
FASTAPI = ("fastapi", "uvicorn")
GOAL_IN_FLIGHT = 256
WARM_UP_S = 0.2
START_S = 90.0
ANSWER_S = 60.0
LEAVE_S = 10.0
SERVER_PLACES = ["/usr/sbin", "/usr/local/sbin"]
"""Debian puts servers where not everybody's PATH leads."""
MAX_SECONDS = 60.0
N_LINES = 8
"""Of what a failed path printed last."""
HEADINGS = (
    f"{'path':<12}{'requests/s':>11}{'p50 ms':>10}{'p99 ms':>10}{'CPU µs/request':>15}"
    f"{'rolloutbus/this':>17}"
)
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Way:
    """One way for a command to travel: which program it is, and what it needs."""

    module: str
    role: str = "client"
    packages: tuple[str, ...] = ()
    """What must be installed in `.venv-bench`; nothing: it runs where this does."""
    argument: str = ""
    """What the program is told besides the number of workers."""
    server: str = ""
    """A program that must be installed; ours is told where it is."""
    goal: float = 0.0
    """So many times its rate is what the bus is to reach with 256 in flight; 0: no goal."""


WAYS = {
    OURS: Way("bus"),
    "ports": Way("bus", "ports"),
    "zmq": Way("zmq_router", goal=10.0),
    "nats": Way("nats_queue", packages=("nats-py",), server="nats-server", goal=2.0),
    "ray": Way("ray_actors", packages=("ray",), goal=20.0),
    "grpc": Way("grpc_aio", packages=("grpcio",)),
    "httpx": Way("fastapi_http", packages=("httpx", *FASTAPI), argument="httpx", goal=20.0),
    "aiohttp": Way("fastapi_http", packages=("aiohttp", *FASTAPI), argument="aiohttp", goal=20.0),
}
PEERS = [name for name in WAYS if name != OURS]


class RunningPath:
    """The processes of one path, and what was measured on it."""

    def __init__(self, name: str, client: Process, errors: IO[bytes]) -> None:
        self.name = name
        self._client = client
        self._errors = errors
        self.samples: defaultdict[int, list[Json]] = defaultdict(list)
        """In flight -> one for each round."""
        self.last: Json = {}

    async def ready(self) -> None:
        """Wait until all its processes are connected."""
        await self._said(START_S)

    async def sample(self, in_flight: int, seconds: float) -> Json:
        """One closed loop, with the CPU seconds of all processes."""
        assert self._client.stdin is not None
        before = session_cpu_s(self._client.pid)
        asked = json.dumps({"in_flight": in_flight, "seconds": seconds})
        self._client.stdin.write(asked.encode() + b"\n")
        found = await self._said(seconds + ANSWER_S)
        return {**found, "cpu_s": session_cpu_s(self._client.pid) - before}

    async def _said(self, timeout_s: float) -> Json:
        assert self._client.stdout is not None
        line = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                line = await self._client.stdout.readline()
        if line.startswith(b"{"):
            return json.loads(line)
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").splitlines()[-N_LINES:]
        raise SystemExit("\n".join([f"{self.name} does not answer. Its last lines:", *last]))


@asynccontextmanager
async def running(name: str, n_workers: int) -> AsyncGenerator[RunningPath]:
    """The processes of a path, in a session of their own; all are ended with the block."""
    way = WAYS[name]
    python = VENV / "bin" / "python" if way.packages else sys.executable
    command = [str(python), "-m", f"benchmarks.command_peers.{way.module}", way.role]
    told = server_of(way) if way.server else way.argument
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), variables.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile() as errors:
        client = await asyncio.create_subprocess_exec(
            *command,
            str(n_workers),
            *([told] if told else []),
            stdin=PIPE,
            stdout=PIPE,
            stderr=errors,
            env=variables,
            start_new_session=True,
        )
        try:
            yield RunningPath(name, client, errors)
        finally:
            await _ended(client)


async def _ended(client: Process) -> None:
    """Ends a client process and its children: closes its input, then kills what is left."""
    assert client.stdin is not None
    client.stdin.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(LEAVE_S):
            await client.wait()
    for pid in _session(client.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, SIGKILL)
    await client.wait()


def session_cpu_s(leader: int) -> float:
    """CPU seconds that the processes of a session have used so far."""
    return sum(_session(leader).values()) / TICKS_PER_S


def _session(leader: int) -> dict[int, int]:
    """Process id -> ticks of CPU time, of each process in the session."""
    found: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                found[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    return found


def server_of(way: Way) -> str:
    """Path of the server's program; empty: there is none."""
    places = [os.environ.get("PATH", os.defpath), *SERVER_PLACES]
    return shutil.which(way.server, path=os.pathsep.join(places)) or ""


def versions() -> dict[str, str]:
    """Package -> its version in `.venv-bench`, of all that any way needs."""
    python = VENV / "bin" / "python"
    if not python.exists():
        return {}
    program = (
        "import importlib.metadata as m, json, sys; found = {d.name.lower(): d.version for d in"
        " m.distributions()}; print(json.dumps({n: found[n] for n in sys.argv[1:] if n in found}))"
    )
    packages = {package for way in WAYS.values() for package in way.packages}
    return json.loads(subprocess.check_output([python, "-c", program, *sorted(packages)]))


def missing(name: str, installed: Iterable[str]) -> str:
    """Why a path cannot be measured here, and what to do; empty: it can."""
    way = WAYS[name]
    if lacks := sorted(set(way.packages) - set(installed)):
        return f"{VENV.name} has no {' and no '.join(lacks)}: make {VENV.name}/.installed"
    if way.server and not server_of(way):
        return f"there is no {way.server} on the PATH: apt install {way.server}"
    return ""


def row_of(name: str, in_flight: int, samples: Sequence[Json], ours: Sequence[Json]) -> Json:
    """Medians of the rounds; ratios are taken within a round."""
    row: Json = {"path": name, "in_flight": in_flight}
    if failed := [each["failed"] for each in samples if "failed" in each]:
        return {**row, "failed": failed[0]}
    rates = [each["per_s"] for each in samples]
    n_all = sum(each["n"] for each in samples)
    row |= {
        "requests_per_s": round(statistics.median(rates)),
        "lowest_per_s": round(min(rates)),
        "highest_per_s": round(max(rates)),
        "p50_ms": round(statistics.median(each["p50_ms"] for each in samples), 2),
        "p99_ms": round(statistics.median(each["p99_ms"] for each in samples), 2),
        "cpu_us_per_request": round(sum(each["cpu_s"] for each in samples) / n_all * 1e6, 1),
    }
    if any("failed" in our for our in ours):
        return row
    ratios = [our["per_s"] / rate for our, rate in zip(ours, rates, strict=True)]
    row["rolloutbus_ratio"] = round(statistics.median(ratios), 2)
    row["rolloutbus_ratios"] = [round(ratio, 2) for ratio in ratios]
    return row


def verdicts(rows: Iterable[Json]) -> list[Json]:
    """How many times the rate of each path with a goal the bus has, and whether that is met."""
    return [
        {
            "path": row["path"],
            "goal": WAYS[row["path"]].goal,
            "ratio": row["rolloutbus_ratio"],
            "is_met": row["rolloutbus_ratio"] >= WAYS[row["path"]].goal,
        }
        for row in rows
        if row["in_flight"] == GOAL_IN_FLIGHT
        and WAYS[row["path"]].goal
        and "rolloutbus_ratio" in row
    ]


def table(report: Json) -> str:
    """Rows for people, those of one number in flight below each other."""
    lines: list[str] = []
    for row in report["rows"]:
        if row["path"] == OURS:
            lines += ["", f"{row['in_flight']} in flight", HEADINGS]
        lines.append(f"{row['path']:<12}{_figures(row)}")
    lines.append("")
    lines += [f"{name}: not measured: {why}" for name, why in report["not_measured"].items()]
    for each in report["goals"]:
        met = "met" if each["is_met"] else "missed"
        lines.append(
            f"goal with {GOAL_IN_FLIGHT} in flight: {each['goal']:g} times {each['path']}; "
            f"{met}: {each['ratio']}"
        )
    return "\n".join(lines).strip()


def _figures(row: Json) -> str:
    if "failed" in row:
        return f" failed: {row['failed']}"
    return (
        f"{row['requests_per_s']:>11,}{row['p50_ms']:>10,}{row['p99_ms']:>10,}"
        f"{row['cpu_us_per_request']:>15,.0f}{row.get('rolloutbus_ratio', '-'):>17}"
    )


async def _measured(names: Sequence[str], options: argparse.Namespace) -> list[Json]:
    async with AsyncExitStack() as stack:
        paths: list[RunningPath] = []
        for name in names:
            _tell(f"starting {name}", options)
            paths.append(await stack.enter_async_context(running(name, options.workers)))
            await paths[-1].ready()
        for in_flight in options.in_flight:
            _tell(f"measuring with {in_flight} in flight", options)
            for path in paths:
                path.last = await path.sample(in_flight, WARM_UP_S)
            for number in range(options.rounds):
                for path in paths if number % 2 == 0 else paths[::-1]:
                    if "failed" not in path.last:  # else that stays its result for this load
                        path.last = await path.sample(in_flight, options.seconds)
                    path.samples[in_flight].append(path.last)
    return [
        row_of(path.name, in_flight, path.samples[in_flight], paths[0].samples[in_flight])
        for in_flight in options.in_flight
        for path in paths
    ]


def _tell(what: str, options: argparse.Namespace) -> None:
    if not options.json:
        print(f"{what} …", file=sys.stderr)


def _peers(text: str) -> list[str]:
    """Names of paths, with commas between them."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in PEERS:
            meant = nearest(name, PEERS)
            hint = f"did you mean {meant}?" if meant else f"there are {', '.join(PEERS)}"
            raise argparse.ArgumentTypeError(f"there is no path {name!r}; {hint}")
    return list(dict.fromkeys(names))


def count(text: str) -> int:
    """An argument that counts something, 1 at least."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"a whole number from 1 on, not {text!r}")
    return int(text)


def seconds_of(text: str) -> float:
    """An argument that is a time."""
    with suppress(ValueError):
        if 0 < (seconds := float(text)) <= MAX_SECONDS:
            return seconds
    raise argparse.ArgumentTypeError(f"seconds, above 0 and at most {MAX_SECONDS:g}, not {text!r}")


def parser_of_options() -> argparse.ArgumentParser:
    """What can be chosen on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.command_path",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    chosen = f"paths to compare with, of {','.join(PEERS)}; all that can be had here"
    add("--peers", type=_peers, metavar="NAME,…", help=chosen)
    add("--in-flight", type=count, nargs="+", default=[1, 64, 256, 1024], metavar="N")
    add("--workers", type=count, default=8, metavar="N", help="processes that answer; 8")
    add("--rounds", type=count, default=3, metavar="N", help="samples of each row; 3")
    add("--seconds", type=seconds_of, default=0.5, metavar="S", help="length of a sample; 0.5")
    add("--json", action="store_true", help="print one JSON object alone")
    return parser


def main() -> None:
    """Measure and print."""
    parser = parser_of_options()
    options = parser.parse_args()
    installed = versions()
    absent = {name: why for name in options.peers or PEERS if (why := missing(name, installed))}
    if options.peers and absent:
        parser.error("; ".join(f"{name} cannot be measured: {why}" for name, why in absent.items()))
    names = [OURS, *(name for name in options.peers or PEERS if name not in absent)]
    try:
        rows = uvloop.run(_measured(names, options))
    except KeyboardInterrupt:
        sys.exit("stopped; nothing was measured to its end")
    report = {
        "rows": rows,
        "goals": verdicts(rows),
        "not_measured": absent,
        "versions": installed,
        "machine": machine(),
        "workers": options.workers,
        "rounds": options.rounds,
        "seconds": options.seconds,
    }
    print(json.dumps(report) if options.json else table(report))


if __name__ == "__main__":
    main()
