"""Clients of a closed loop in processes of their own: one of Python may do less than the router.

Such a process prints `{}` once it is connected. For each line that it reads, a number of seconds,
it runs so long and prints what it has seen; it leaves at the end of its input.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Self

import msgspec
import uvloop

from benchmarks.loop_load import BusClient, Client, Load, PlainClient

ROOT = Path(__file__).resolve().parents[1]


class Seen(msgspec.Struct):
    """What the clients of one process, or of several, have seen of a run."""

    rate: float = 0.0
    """Requests answered per second of the run."""
    n_answered: int = 0
    n_lost: int = 0
    n_doubled: int = 0
    problem: str = ""


class SplitLoad:
    """A `Load` that is split among processes."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self.n_answered = self.n_lost = self.n_doubled = 0
        self.problem = ""

    @classmethod
    def begin(
        cls, side: str, endpoint: str, case: str, n_clients: int, window: int, n_processes: int
    ) -> Self:
        """Start and connect them; each has its share of the clients."""
        names = [f"{case}-{number}" for number in range(n_clients)]
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.loop_clients", side, endpoint),
                    *(str(window), *names[place::n_processes]),
                ],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for place in range(n_processes)
        ]
        for each in processes:
            _heard(each)
        return cls(processes)

    async def run(self, seconds: float) -> float:
        """Requests answered per second, over about `seconds`; ends with nothing in flight."""
        for each in self._processes:
            assert each.stdin is not None
            each.stdin.write(f"{seconds}\n")
            each.stdin.flush()
        lines = await asyncio.gather(*(asyncio.to_thread(_heard, each) for each in self._processes))
        found = [msgspec.json.decode(line, type=Seen) for line in lines]
        self.n_answered += sum(each.n_answered for each in found)
        self.n_lost += sum(each.n_lost for each in found)
        self.n_doubled += sum(each.n_doubled for each in found)
        self.problem = self.problem or next((each.problem for each in found if each.problem), "")
        return sum(each.rate for each in found)

    def close(self) -> None:
        """End the processes."""
        for each in self._processes:
            each.kill()
            each.communicate()


def _heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a process of clients has ended: see above")
    return line


async def _serve(side: str, endpoint: str, window: int, names: list[str]) -> None:
    clients: list[Client] = [
        BusClient(endpoint, name) if side == "router" else PlainClient(endpoint) for name in names
    ]
    load = Load(clients, window)
    print("{}", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        before = load.n_answered
        rate = await load.run(float(line))
        seen = Seen(rate, load.n_answered - before, load.n_lost, load.n_doubled, load.problem)
        print(json.dumps(msgspec.to_builtins(seen)), flush=True)


def main() -> None:
    """Arguments: the middle's name, its endpoint, requests in flight of a client, their names."""
    side, endpoint, window, *names = sys.argv[1:]
    uvloop.run(_serve(side, endpoint, int(window), names))


if __name__ == "__main__":
    main()
