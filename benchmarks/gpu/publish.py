"""What does a publish cost those who read streams, and how long is it until all workers attest it?

A trainer on the first GPU publishes a bfloat16 model with the layer shapes of a 7B one to a worker
there, while streams of tokens are read through the public client. Looked at from outside: the time
from `publish()` to its return with `require="all"`, its phases as the handle reports them, tokens
per second of a stream meanwhile against the quiet times before all publishes, and the longest gap
between two deltas of one stream. The first publish by each way has figures of its own: what is lazy
is warm after the first of all.

`collective` has a worker on each of the other GPUs, to which the trainer broadcasts over nccl;
with `--apart` every way has, and with `--everywhere` the other ways have one on each GPU. Beside
`collective` stands what such a broadcast takes to as many processes that do nothing else.

Streams are read in a process of their own (`elsewhere`) or beside the publisher (`beside`), where
its threads and the readers share one interpreter.

Engines make up the weights that they begin with; one serves all ways on its GPU. Each publish is
told on standard error at once. Ctrl-C ends the run, with rows of what it has found.

    python benchmarks/gpu/publish.py --layers 32 --json
    python benchmarks/gpu/publish.py --layers 32 --readers elsewhere --picture publish.png
    python benchmarks/gpu/publish.py --layers 32 --readers elsewhere --ways collective
    python benchmarks/gpu/publish.py --layers 32 --readers elsewhere --ways cuda_ipc --apart
    python benchmarks/gpu/publish.py --layers 32 --readers elsewhere --ways shm --everywhere
"""

import argparse
import asyncio
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Literal, Self, cast, get_args

import torch

import rolloutbus
from benchmarks.gpu.raw_broadcast import raw_broadcast_s
from benchmarks.gpu.weights import WAYS, Weights, build_model, copy_s
from rolloutbus import RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.trainer_adapter.publisher.collective import CollectiveOffering

DEADLINE_S = 300.0
PROMPT = list(range(3, 19))
MAX_CONTEXT = 1024
TOKENS = 200, 600
"""Of a stream: least and most. Streams that all ended at once would make quiet times unequal."""
QUIET_S = 2.0
AFTER_S = 0.2
"""Waited after a publish, so that the gaps that it makes have ended."""
Transport = Literal["cuda_ipc", "collective", "shm"]


@dataclass(slots=True)
class Publishing:
    """One publish: when it began and ended, and what the worker says of it."""

    began: float
    phases: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    """Each phase with its first moment, as time.perf_counter() tells it."""
    ended: float = 0.0
    stall_s: float = 0.0
    broadcast_s: float = 0.0
    """`collective`: of all buckets to all workers."""
    transfer_s: float = 0.0
    """`collective`: from the router's order until all workers have verified what they got."""

    @property
    def total_s(self) -> float:
        """From `publish()` to its return."""
        return self.ended - self.began

    def durations(self) -> dict[str, float]:
        """Seconds by phase, in order."""
        ends = [*self.phases[1:], ("", self.ended)]
        return {
            name: stop - start
            for (name, start), (_, stop) in zip(self.phases, ends, strict=True)
            if name != "committed"
        }


Place = Literal["elsewhere", "beside"]
Gap = tuple[float, float, int]
"""Beginning and end of the time between two deltas of one stream, and tokens of the second one."""
MAX_NEWS_BYTES = 64 << 20


class Readers:
    """Streams that are always open, and when their deltas came."""

    def __init__(self, client: RolloutClient, n_streams: int) -> None:
        self._client = client
        self.gaps: list[Gap] = []
        self._has_begun = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read(Random(i))) for i in range(n_streams)]

    async def begun(self) -> None:
        """Wait for the first delta, if any stream is read."""
        if not self._tasks:
            return
        first = asyncio.create_task(self._has_begun.wait())
        await asyncio.wait([first, *self._tasks], return_when="FIRST_COMPLETED")
        if not first.done():
            first.cancel()
            await self.close()

    async def _read(self, chance: Random) -> None:
        while True:
            sampling = SamplingParams(max_new_tokens=chance.randint(*TOKENS), ignore_eos=True)
            before: float | None = None
            async for delta in self._client.stream(PROMPT, sampling, deadline_s=DEADLINE_S):
                now = time.perf_counter()
                self._has_begun.set()
                if before is not None:
                    self.gaps.append((before, now, len(delta.tokens)))
                before = now

    async def news(self) -> list[Gap]:
        """Gaps that have ended since the last time."""
        if any(each.done() for each in self._tasks):
            await self.close()
        found, self.gaps = self.gaps, []
        return found

    async def close(self) -> None:
        """Read no more."""
        for each in self._tasks:
            each.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise SystemExit(f"a stream failed: {ended!r}")


class ReadersElsewhere:
    """`Readers` in another process: nothing that the publisher's does keeps them from reading."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def begin(cls, address: str, n_streams: int) -> Self:
        """Start the process; it ends with this one's end of its input."""
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, __file__, "--streams", str(n_streams), "--read", address)
        return cls(
            await asyncio.create_subprocess_exec(
                *command,
                stdin=pipe,
                stdout=pipe,
                limit=MAX_NEWS_BYTES,
                start_new_session=True,  # Ctrl-C is not for it
            )
        )

    async def begun(self) -> None:
        """Wait for the first delta."""
        await self._ask("begun")

    async def news(self) -> list[Gap]:
        """Gaps since the last time; clocks of processes agree."""
        return [(start, stop, n) for start, stop, n in await self._ask("news")]

    async def close(self) -> None:
        """Read no more."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if await self._process.wait():
            raise SystemExit("a stream failed: see above")

    async def _ask(self, what: str) -> Any:  # noqa: ANN401 - any JSON
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n".encode())
        answer = await self._process.stdout.readline()
        if not answer:
            raise SystemExit("the process that reads streams has ended: see above")
        return json.loads(answer)


async def read_for_another(address: str, n_streams: int) -> None:
    """Reads streams, and answers on standard output what `ReadersElsewhere` asks."""
    async with rolloutbus.connect(address, name="reader") as client:
        readers = Readers(client, n_streams)
        gc.disable()  # a full collection here would look like an engine's gap
        while asked := (await asyncio.to_thread(sys.stdin.readline)).strip():
            answer = await (readers.begun() if asked == "begun" else readers.news())
            print(json.dumps(answer), flush=True)
        await readers.close()


def rate(gaps: Sequence[Gap], times: Sequence[tuple[float, float]]) -> float:
    """Tokens per second of one stream in those times, from its first token to its last one."""
    n_tokens = seconds = 0.0
    for begin, end, n in gaps:
        share = sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in times)
        if share:
            n_tokens += n * share / (end - begin)
            seconds += share
    return n_tokens / seconds if seconds else math.nan


def longest_gap(gaps: Sequence[Gap], start: float, stop: float) -> float:
    """Of all gaps that reach into that time, seconds; all of it, if no gap has ended since."""
    found = (end - begin for begin, end, _ in gaps if end > start and begin < stop)
    return max(found, default=stop - start)


class TimedOffering(CollectiveOffering):
    """Tells how long its last transfer took."""

    transfer_s = 0.0

    async def serve(self) -> None:
        """Send, by the clock."""
        began = time.perf_counter()
        await super().serve()
        self.transfer_s = time.perf_counter() - began


class Trainer:
    """Publishes the same weights again and again, watched."""

    def __init__(self, client: RolloutClient, weights: Weights) -> None:
        self._publisher = WeightPublisher(client)
        self._weights = weights
        self._offering = TimedOffering("nccl")
        self._publisher.offer("collective", self._offering)

    async def publish(self, way: Transport) -> Publishing:
        """One version."""
        found = Publishing(time.perf_counter())
        handle = self._publisher.start(
            self._weights, transport=way, require="all", deadline_s=DEADLINE_S
        )
        try:
            async for progress in handle.changes():
                if not found.phases or found.phases[-1][0] != progress.phase:
                    found.phases.append((progress.phase, time.perf_counter()))
            published = await handle
        except asyncio.CancelledError:
            handle.stop()
            raise
        found.ended = time.perf_counter()
        found.stall_s = max(published.stall_ms.values()) / 1e3
        taken = set(published.transport.values())
        if taken != {way}:
            raise SystemExit(f"{way} was not taken: {taken} {published.why}")
        if way == "collective":
            found.broadcast_s = self._offering.broadcast_s
            found.transfer_s = self._offering.transfer_s
        return found

    def close(self) -> None:
        """Free its copies."""
        self._publisher.forget()


Rows = dict[str, dict[str, Any]]


async def measure(model: Path, weights: Weights, options: argparse.Namespace, rows: Rows) -> None:
    """Publishes among quiet times, way by way, to SGLang engines that are read; fills `rows`."""
    slots = max(1, options.streams)
    arguments = {
        "load_format": "dummy",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "mem_fraction_static": 0.4,
        "max_total_tokens": slots * MAX_CONTEXT,
        "cuda_graph_max_bs_decode": slots,
        "disable_prefill_cuda_graph": options.eager_prompts,
    }
    engine_options = {
        "device": "cuda",
        "dtype": "bfloat16",
        "slots": slots,
        "max_context": MAX_CONTEXT,
        "arguments": arguments,
    }
    all_ways: list[Transport] = options.ways
    others: list[Transport] = [w for w in all_ways if options.apart or w == "collective"]
    here: list[Transport] = [w for w in all_ways if w not in others]
    all_gpus = [*range(torch.cuda.device_count())]
    for ways, gpus in ((here, all_gpus if options.everywhere else [0]), (others, all_gpus[1:])):
        if not ways:
            continue
        began = time.perf_counter()
        async with AsyncExitStack() as stack:
            up = rolloutbus.up(
                model=model,
                workers=len(gpus),
                gpus=[[gpu] for gpu in gpus],
                engine="sglang",
                engine_options=engine_options,
            )
            fleet = await stack.enter_async_context(up)
            connecting = rolloutbus.connect(fleet.address, name="trainer")
            client = await stack.enter_async_context(connecting)
            trainer = Trainer(client, weights)
            stack.callback(trainer.close)
            _say(f"{len(gpus)} engines serve after {time.perf_counter() - began:.0f} s")
            n_streams = options.streams * len(gpus)
            for way in ways:
                for place in options.readers if n_streams else options.readers[:1]:
                    is_beside = place == "beside"
                    readers = (
                        Readers(client, n_streams)
                        if is_beside
                        else await ReadersElsewhere.begin(fleet.address, n_streams)
                    )
                    name = f"{way}, readers {place}"
                    try:
                        await readers.begun()
                        await measure_way(name, trainer, way, readers, options, rows)
                    finally:
                        await readers.close()


async def measure_way(
    name: str,
    trainer: Trainer,
    way: Transport,
    readers: Readers | ReadersElsewhere,
    options: argparse.Namespace,
    rows: Rows,
) -> None:
    """The first publish and others of one row, each told at once; puts the row into `rows`."""
    found: list[Publishing] = []
    gaps: list[Gap] = []  # brought piece by piece: all at once would be one of its own
    try:
        for number in range(options.rounds + 1):
            await asyncio.sleep(QUIET_S)
            publishing = await trainer.publish(way)
            await asyncio.sleep(AFTER_S)
            news = await readers.news()
            gaps += news
            found.append(publishing)
            told = json.dumps(told_of(publishing, news))
            _say(f"{name}: publish {number} of {options.rounds}: {told}")
    finally:
        if len(found) > 1:  # the first one has figures of its own
            rows[name] = row_of(found, gaps)
            _say(f"{name}: {json.dumps(rows[name])}")


def told_of(each: Publishing, gaps: Sequence[Gap]) -> dict[str, Any]:
    """Times of one publish in milliseconds, and a ratio to the time before it if anybody reads."""
    ratio = _rate_of(each, gaps) / _quiet_rate([each], gaps)
    seen = {"rate_to_quiet": round(ratio, 3), "gap_ms": _ms(_gap(each, gaps))}
    return {
        "total_ms": _ms(each.total_s),
        "phases_ms": {name: _ms(duration) for name, duration in each.durations().items()},
        "stall_ms": _ms(each.stall_s),
        **(_broadcasts([each]) if each.transfer_s else {}),
        **(seen if gaps else {}),
    }


def row_of(found: Sequence[Publishing], gaps: Sequence[Gap]) -> dict[str, Any]:
    """Times in milliseconds and ratios of one way."""
    first, *others = found
    # A phase that is shorter than the look at it may be missing in some.
    names = dict.fromkeys(name for each in others for name in each.durations())
    phases = {
        name: statistics.median(each.durations().get(name, 0.0) for each in others)
        for name in names
    }
    return {
        "rounds": len(others),
        "total_ms": _ms(statistics.median(each.total_s for each in others)),
        "total_max_ms": _ms(max(each.total_s for each in others)),
        "first_ms": _ms(first.total_s),
        "phases_ms": {name: _ms(each) for name, each in phases.items()},
        "stall_ms": _ms(statistics.median(each.stall_s for each in others)),
        **(_broadcasts(others) if first.transfer_s else {}),
        **({"first_transfer_ms": _ms(first.transfer_s)} if first.transfer_s else {}),
        **(_seen_by_readers(first, others, gaps) if gaps else {}),
    }


def _broadcasts(found: Sequence[Publishing]) -> dict[str, float]:
    return {
        "transfer_ms": _ms(statistics.median(each.transfer_s for each in found)),
        "broadcast_ms": _ms(statistics.median(each.broadcast_s for each in found)),
    }


def _seen_by_readers(
    first: Publishing, others: Sequence[Publishing], gaps: Sequence[Gap]
) -> dict[str, float]:
    quiet_rate = _quiet_rate([first, *others], gaps)
    ratios = [_rate_of(each, gaps) / quiet_rate for each in others]
    quiet = [longest_gap(gaps, each.began - QUIET_S / 2, each.began) for each in others]
    longest = [_gap(each, gaps) for each in others]
    return {
        "rate_to_quiet": round(statistics.median(ratios), 3),
        "first_rate_to_quiet": round(_rate_of(first, gaps) / quiet_rate, 3),
        "gap_ms": _ms(statistics.median(longest)),
        "gap_max_ms": _ms(max(longest)),
        "first_gap_ms": _ms(_gap(first, gaps)),
        "quiet_gap_ms": _ms(statistics.median(quiet)),
        "quiet_gap_max_ms": _ms(max(quiet)),
    }


def _rate_of(each: Publishing, gaps: Sequence[Gap]) -> float:
    return rate(gaps, [(each.began, each.ended)])


def _quiet_rate(found: Sequence[Publishing], gaps: Sequence[Gap]) -> float:
    """Before all of these publishes: one second alone may be unlike the next."""
    return rate(gaps, [(each.began - QUIET_S + AFTER_S, each.began) for each in found])


def _gap(each: Publishing, gaps: Sequence[Gap]) -> float:
    return longest_gap(gaps, each.began, each.ended)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """A waterfall of the phases, a bar for each way."""
    # Only here: a GPU host may lack it, and its backend is chosen before the rest is imported.
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = cast("Any", plt).subplots(figsize=(9, 1.2 + 0.8 * len(rows)))  # untyped
    names = [*dict.fromkeys(name for row in rows.values() for name in row["phases_ms"])]
    colours = dict(zip(names, cast("Any", mpl).colormaps["tab10"].colors, strict=False))
    for place, (way, row) in enumerate(rows.items()):
        ends = [0.0]
        for name, duration in row["phases_ms"].items():
            label = name if way == next(iter(rows)) else None
            axes.barh(place, duration, left=ends[-1], color=colours[name], label=label)
            ends.append(ends[-1] + duration)
        for start, stop in pairwise(ends):
            if stop - start > ends[-1] / 12:
                axes.text((start + stop) / 2, place, f"{stop - start:.0f}", ha="center")
    axes.set_yticks(range(len(rows)), [*rows])
    axes.set_xlabel("milliseconds from publish() on")
    axes.legend(ncols=4, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, bbox_inches="tight", dpi=150)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The hardware first, then way by way."""
    weights = build_model(folder / "model", options.layers, has_files=False)
    size = sum(each.nbytes for each in weights.values())
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "model_gb": round(size / 1e9, 2),
        "streams": options.streams,
        "device_copy_ms": _ms(copy_s(weights, "cuda:0", options.rounds)),
    }
    _say(json.dumps(report))
    torch.cuda.empty_cache()  # the engine measures what is free
    gc.collect()
    gc.freeze()  # a full collection here would lengthen a publish
    if "collective" in options.ways:
        raw, first = raw_broadcast_s(weights, options.rounds, folder)
        report |= {"raw_broadcast_ms": _ms(raw), "first_raw_broadcast_ms": _ms(first)}
        _say(f"a broadcast to {torch.cuda.device_count() - 1} GPUs takes {_ms(raw)} ms")
    rows: Rows = {}
    try:
        asyncio.run(measure(folder / "model", weights, options, rows))
    except KeyboardInterrupt:
        if not rows:
            raise
        _say("stopped: the last row may be of fewer publishes")
    return report | {"ways": rows}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a publish costs the readers of streams")
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    parser.add_argument("--layers", type=int, default=6, help="6 layers are 2.9 GB, 32 are 13.5")
    parser.add_argument("--rounds", type=int, default=8, help="beside the first publish")
    parser.add_argument(
        "--streams", type=int, default=32, help="of each engine; 0: nobody reads, engines are idle"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--apart", action="store_true", help="engines on the other GPUs, whatever the way"
    )
    where.add_argument(
        "--everywhere", action="store_true", help="engines on all GPUs, but for collective"
    )
    parser.add_argument(
        "--eager-prompts", action="store_true", help="engines make no CUDA graphs for prompts"
    )
    parser.add_argument("--ways", nargs="+", default=["cuda_ipc", "shm"], choices=WAYS)
    parser.add_argument(
        "--readers", nargs="+", default=["elsewhere", "beside"], choices=get_args(Place)
    )
    parser.add_argument("--picture", type=Path, help="a file for the waterfall of phases")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.read:
        asyncio.run(read_for_another(options.read, options.streams))
        return
    needs_two = options.apart or options.everywhere or "collective" in options.ways
    if needs_two and torch.cuda.device_count() < 2:
        parser.error("--apart, --everywhere and --ways collective need a second GPU")
    with tempfile.TemporaryDirectory(prefix="publish-") as folder:
        try:
            report = run(options, Path(folder))
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    if options.picture:
        draw(report["ways"], options.picture)
    print(json.dumps(report, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
