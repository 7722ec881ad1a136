"""How fast do weights reach the engines, and for how long do those stand still?

A trainer (this process) publishes versions of one model to two transformers workers on this host
that are generating all the while, by one transport after another, round by round. In the same run:
a warm copy of the model within memory, and a bare gloo broadcast to two processes.

    python benchmarks/weights.py --json
    python benchmarks/weights.py --layers 2 --rounds 3 --transports shm tcp
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import rolloutbus
from benchmarks.open_requests import open_requests
from benchmarks.weight_baselines import GlooBroadcast, memcpy_s
from benchmarks.weight_model import HeldModel, build_model
from rolloutbus.launcher.fleet import children_of

N_WORKERS = 2
GIB = 1024**3
TRANSPORTS = ("shm", "tcp", "delta", "collective")
UPDATE_DEADLINE_S = 300.0
OPEN_PER_WORKER = 2


class Way:
    """Measurements of one transport."""

    def __init__(self) -> None:
        self.write_s: list[float] = []
        self.update_s: list[float] = []
        self.stall_s: list[float] = []
        self.moved_bytes: list[int] = []
        self.taken: set[str] = set()
        self.peak_extra_bytes = 0


async def _publish(
    publisher: rolloutbus.WeightPublisher, held: HeldModel, transport: str, way: Way
) -> None:
    held.step(sparse=transport == "delta")
    hosts = _hosts()
    before = {pid: _reset_peak(pid) for pid in hosts}
    published = await publisher.publish(
        held.tensors,
        in_flight="keep",
        require="all",
        transport=transport,  # type: ignore[arg-type]
        deadline_s=UPDATE_DEADLINE_S,
    )
    way.write_s.append(published.write_s)
    way.update_s.append(published.update_s)
    way.stall_s += [stall_ms / 1e3 for stall_ms in published.stall_ms.values()]
    way.moved_bytes += list(published.moved_bytes.values())
    way.taken |= set(published.transport.values())
    grown = [_status_bytes(pid, "VmHWM") - before[pid] for pid in hosts]
    way.peak_extra_bytes = max(way.peak_extra_bytes, *grown)


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Round by round, every way once."""
    model = folder / "model"
    held = HeldModel(build_model(model, options.layers))
    ways = {name: Way() for name in options.transports}
    copies: list[float] = []
    broadcasts: list[float] = []
    up = rolloutbus.up(
        model=model,
        workers=N_WORKERS,
        engine="transformers",
        engine_options={"threads": 1, "slots": 4, "kv_tokens": 4096, "max_context": 512},
        run_dir=folder / "fleet",
    )
    async with up as fleet, rolloutbus.connect(fleet.address, name="trainer") as client:
        publisher = rolloutbus.WeightPublisher(client)
        async with open_requests(client, N_WORKERS * OPEN_PER_WORKER, UPDATE_DEADLINE_S):
            with GlooBroadcast(N_WORKERS, held.size_bytes) as gloo:
                for number in range(options.rounds + 1):
                    for name, way in ways.items():
                        await _publish(publisher, held, name, way if number else Way())
                    if number:  # the first round faults the pages in
                        copies.append(memcpy_s(held.size_bytes))
                        broadcasts.append(await asyncio.to_thread(gloo.seconds))
                    _say(f"round {number} of {options.rounds}")
    return _report(held.size_bytes, ways, copies, broadcasts)


def _report(
    size_bytes: int, ways: dict[str, Way], copies: list[float], broadcasts: list[float]
) -> dict[str, Any]:
    copy_s, broadcast_s = statistics.median(copies), statistics.median(broadcasts)
    report: dict[str, Any] = {
        "model_gib": round(size_bytes / GIB, 2),
        "memcpy_gb_per_s": round(size_bytes / copy_s / 1e9, 2),
        "gloo_gb_per_s": round(size_bytes / broadcast_s / 1e9, 2),
    }
    for name, way in ways.items():
        update_s = statistics.median(way.update_s)
        report[name] = {
            "taken": sorted(way.taken),
            "gb_per_s": round(size_bytes / update_s / 1e9, 2),
            "to_memcpy": round(copy_s / update_s, 3),
            "to_gloo": round(broadcast_s / update_s, 2),
            "write_gb_per_s": round(size_bytes / statistics.median(way.write_s) / 1e9, 2),
            "stall_p50_to_memcpy": round(statistics.median(way.stall_s) / copy_s, 2),
            "stall_p99_to_memcpy": round(_p99(way.stall_s) / copy_s, 2),
            "moved_share": round(statistics.median(way.moved_bytes) / size_bytes, 4),
            "peak_extra_share": round(way.peak_extra_bytes / size_bytes, 2),
        }
    if "shm" in ways and "tcp" in ways:
        report["shm_to_zmq_ipc"] = round(report["shm"]["gb_per_s"] / report["tcp"]["gb_per_s"], 2)
    return report | {"cores": os.cpu_count(), "load_1m": os.getloadavg()[0]}


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


def _hosts() -> list[int]:
    """Processes that hold an engine: grandchildren of this one through the workers."""
    return [host for worker in children_of(os.getpid()) for host in children_of(worker)]


def _reset_peak(pid: int) -> int:
    """Start a new peak; returns the memory held now, bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
    return _status_bytes(pid, "VmRSS")


def _status_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Weight transports against memcpy and gloo")
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    parser.add_argument("--layers", type=int, default=16, help="16 layers are 1.3 GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS, metavar="NAME")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weights-") as folder:
        report = asyncio.run(measure(options, Path(folder)))
    if not options.json:
        _say(f"done in {time.monotonic() - began:.0f} s")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
