"""What a recorder costs the bus, and whether it hears everything.

A fleet of fake workers under full load, all rollouts streamed, with and without a recorder in
turns: the tokens per second of the one against the other. The tap is on all the time.

    python -m benchmarks.recording --json --workers 16 --step-ms 10 --slots 125
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import uvloop

import rolloutbus
from benchmarks.side_processes import machine, usage_of
from launcher.plan import environment
from rolloutbus import Fleet, RolloutClient, Sampling

GOAL = 0.97
"""Of the tokens per second without a recorder."""
DEADLINE_S = 600.0


class Load:
    """Keeps all slots of the fleet busy and counts the tokens of what has finished."""

    def __init__(self, client: RolloutClient, n_open: int, n_tokens: int) -> None:
        self._client = client
        self._sampling = Sampling(max_new_tokens=n_tokens, ignore_eos=True, seed=1)
        self._n_open = n_open
        self.n_tokens = 0

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._one(i)) for i in range(self._n_open)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def per_s(self, seconds: float) -> float:
        """Tokens per second over the next seconds."""
        begun_at, n_before = time.perf_counter(), self.n_tokens
        await asyncio.sleep(seconds)
        return (self.n_tokens - n_before) / (time.perf_counter() - begun_at)

    async def _one(self, number: int) -> None:
        while True:
            stream = self._client.stream([1, number], self._sampling, deadline_s=DEADLINE_S)
            async for delta in stream:
                self.n_tokens += len(delta.tokens)


async def _recorded(fleet: Fleet, load: Load, out: Path, seconds: float) -> dict[str, Any]:
    """The load while a recorder listens, and what that one says at its end."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "launcher.cli", "record", str(out), "--json"),
        *("--router", fleet.address),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    assert child.stderr is not None
    await child.stderr.readline()
    await load.per_s(seconds / 4)
    per_s = await load.per_s(seconds)
    rss_mib = usage_of(child.pid)["rss_mib"]
    child.send_signal(signal.SIGINT)
    told, _ = await child.communicate()
    return {**json.loads(told), "per_s": per_s, "rss_mib": rss_mib}


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    without: list[float] = []
    recordings: list[dict[str, Any]] = []
    engine = {"slots": options.slots, "step_s": options.step_ms / 1000}
    n_open = options.workers * options.slots
    with tempfile.TemporaryDirectory() as directory:
        async with (
            rolloutbus.up(
                workers=options.workers, engine="fake", engine_options=engine, store=False, tap=True
            ) as fleet,
            rolloutbus.connect(fleet.address, name="benchmark") as client,
            Load(client, n_open, options.tokens) as load,
        ):
            await load.per_s(options.seconds)
            for number in range(options.rounds):
                without.append(await load.per_s(options.seconds))
                out = Path(directory, str(number))
                recordings.append(await _recorded(fleet, load, out, options.seconds))
    ratios = [each["per_s"] / one for each, one in zip(recordings, without, strict=True)]
    lost = sum(
        each["heard"]["lost_tap"] + each["heard"]["lost_tokens"] + each["n_dropped"]
        for each in recordings
    )
    ratio = statistics.median(ratios)
    return {
        "ratio": round(ratio, 3),
        "goal": GOAL,
        "is_met": ratio >= GOAL and lost == 0,
        "ratios": [round(each, 3) for each in ratios],
        "lost": lost,
        "per_s": round(statistics.median(without)),
        "rss_mib": max(each["rss_mib"] for each in recordings),
        "records": sum(each["n_records"] for each in recordings),
        "machine": machine(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The bus with and without a recorder")
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=128, help="of each rollout")
    print(json.dumps(uvloop.run(_measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
