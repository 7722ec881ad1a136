"""What do several GPUs behind one router make of it: throughput, and agents by their placement?

One fleet with an SGLang engine on each GPU (or on each `--tp` of them). Two measurements:

- `throughput`: as many requests at once as there are places, in turns at the first engine alone
  and at all of them, placed by the router. Beside it, as what the machine allows, the same with
  engines that each run in a process of their own on the same GPUs, without the bus. Goal: 3.95
  times one engine with four (0.9875 of each).
- `agents`: multi-turn agents in groups that share a task. All turns of all agents go through the
  same fleet, placed in turns by chance, round robin, by the least load, like SMG's `cache_aware`
  (all four by naming a worker for each request), and by the router, which is told session and
  group (`names`) or nothing. Engines report the prefixes that they have cached, so that it has
  them to go by. Caches are empty at the start of each turn. Goals: makespan at most 0.8 of least
  loaded, at most 1.0 of `cache_aware`. Beside it stands what makes it long: the share of it for
  which an engine, by the mean of all, has nothing left to do (`idle`), and the busiest engine as a
  multiple of that mean, by tokens sampled and by prompt tokens that were not cached.

Each turn is told on standard error at once, and Ctrl-C ends a measurement with the rounds it has.

    python benchmarks/gpu/fleet.py --json
    python benchmarks/gpu/fleet.py --only agents --shape 7b --ways least_loaded names --rounds 3

On a CPU (`--device cpu --engines 2 --shape tiny --requests 8`) SGLang starts with the environment
alone that `tests/sglang/fleets.py` makes.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import torch

import rolloutbus
from benchmarks.cache_aware import CacheAware
from benchmarks.gpu.sglang_bus import (
    CONTEXT_TOKENS,
    SHAPES,
    VOCABULARY,
    Child,
    engine_options,
    prompts,
    write_shape,
)
from rolloutbus import RolloutClient, SamplingParams, Want

Prompts = list[list[int]]
DEADLINE_S = 400.0
SHARE_GOAL = 0.9875
MAKESPAN_GOALS = {"least_loaded": 0.8, "cache_aware": 1.0}
"""Makespan with session and group named, as a multiple."""
SPARE_CONTEXT = 96
"""Tokens that an engine has room for beside an agent's longest context."""
CACHED = Want(cached_tokens=True)
Measurement = Literal["throughput", "agents"]
Way = Literal["chance", "round_robin", "least_loaded", "cache_aware", "bus", "names"]
WAYS: tuple[Way, ...] = get_args(Way)


def spread(chance: Random, median: float) -> int:
    """A lognormal number with this median, at most four times as much."""
    return max(1, round(min(4 * median, median * chance.lognormvariate(0.0, 0.6))))


@contextmanager
def whole_rounds(found: Mapping[Any, list[Any]], n_rounds: int) -> Generator[None]:
    """Rounds that put what they find into these lists; Ctrl-C ends them, and keeps the whole ones.

    The first one does not count: where no other has ended, nothing is told.
    """
    try:
        yield
    except asyncio.CancelledError:
        n_ended = min(map(len, found.values()))
        if n_ended < 2:
            _say("stopped before a round that counts had ended")
            raise
        _say(f"stopped after {n_ended - 1} of {n_rounds} rounds")
        for each in found.values():
            del each[n_ended:]


# --------------------------------------------------------------------------------------------------
# Throughput


async def over_bus(
    client: RolloutClient, options: argparse.Namespace, worker: str, batches: list[Prompts]
) -> int:
    """Tokens of these requests, all at once, at this worker; `""`: where the router places them."""
    sampling = SamplingParams(max_new_tokens=options.new_tokens, temperature=1.0, ignore_eos=True)
    rollouts = await asyncio.gather(
        *(
            client.generate(prompt, sampling, worker=worker, deadline_s=DEADLINE_S)
            for batch in batches
            for prompt in batch
        )
    )
    return sum(len(each.tokens) for each in rollouts)


async def in_process(
    engines: list[Child], options: argparse.Namespace, batches: list[Prompts]
) -> int:
    """Tokens of these requests, all at once, a batch at each engine."""

    async def one(engine: Child, batch: Prompts) -> int:
        task = {"kind": "plain", "prompts": batch, "n": options.new_tokens}
        return (await asyncio.to_thread(engine.ask, task))["n_tokens"]

    return sum(await asyncio.gather(*map(one, engines, batches)))


async def throughput(
    client: RolloutClient, workers: list[str], engines: list[Child], options: argparse.Namespace
) -> dict[str, Any]:
    """All sides in turns; who came first in one round comes last in the next."""
    sides: dict[str, tuple[int, Callable[[list[Prompts]], Awaitable[int]]]] = {
        "bus_one": (1, partial(over_bus, client, options, workers[0])),
        "bus_all": (len(workers), partial(over_bus, client, options, "")),
        "in_process_one": (1, partial(in_process, engines[:1], options)),
        "in_process_all": (len(workers), partial(in_process, engines, options)),
    }
    rates: dict[str, list[float]] = {side: [] for side in sides}
    with whole_rounds(rates, options.rounds):
        for number in range(options.rounds + 1):
            for side in sides if number % 2 else reversed(sides):
                n_engines, salvo = sides[side]
                # No prompt comes to an engine twice: it would know the beginning.
                seed = (number * len(sides) + [*sides].index(side)) * len(workers)
                batches = [prompts(options, seed + place) for place in range(n_engines)]
                began = time.perf_counter()
                rate = await salvo(batches) / (time.perf_counter() - began)
                rates[side].append(rate)
                _say(f"round {number} of {options.rounds}: {side}: {rate:,.0f} tokens/s")

    def ratios(of: str, to: str) -> list[float]:
        return [round(a / b, 3) for a, b in zip(rates[of][1:], rates[to][1:], strict=True)]

    def ratio(of: str, to: str) -> float:
        return round(statistics.median(ratios(of, to)), 3)

    return {
        "rounds": len(rates["bus_all"]) - 1,
        "new_tokens": options.new_tokens,
        "requests_per_engine": options.requests,
        "tokens_per_s": {name: round(statistics.median(each[1:])) for name, each in rates.items()},
        "all_to_one": {
            "bus": ratio("bus_all", "bus_one"),
            "in_process": ratio("in_process_all", "in_process_one"),
        },
        "bus_to_in_process": {
            "one": ratio("bus_one", "in_process_one"),
            "all": ratio("bus_all", "in_process_all"),
        },
        "all_to_one_of_rounds": {
            "bus": ratios("bus_all", "bus_one"),
            "in_process": ratios("in_process_all", "in_process_one"),
        },
        "is_met": ratio("bus_all", "bus_one") >= SHARE_GOAL * len(workers),
    }


# --------------------------------------------------------------------------------------------------
# Agents


@dataclass
class Agent:
    """Somebody who asks turn after turn, with all that was said before."""

    name: str
    group: str
    context: list[int]
    n_system: int
    n_task: int
    """Tokens of the context that all agents share, and that those of the group do."""
    turns: list[tuple[int, list[int], float]]
    """Tokens to sample, what a tool returns to them, seconds that it takes."""


def agents_of(options: argparse.Namespace, n_engines: int, seed: int) -> list[Agent]:
    """Groups that share a task, of at most half a context; all share the system prompt."""
    chance = Random(seed)
    top = VOCABULARY[options.shape]

    def words(n: int) -> list[int]:
        return [chance.randrange(3, top) for _ in range(n)]

    system = words(options.system_tokens)
    agents: list[Agent] = []
    for group in range(options.groups * n_engines):
        n_task = min(spread(chance, options.task_tokens), options.most_tokens // 2)
        task = system + words(n_task)
        for place in range(options.group):
            turns: list[tuple[int, list[int], float]] = []
            n_context = len(task)
            for _ in range(spread(chance, options.turns)):
                turn = (
                    spread(chance, options.answer_tokens),
                    words(spread(chance, options.result_tokens)),
                )
                n_context += turn[0] + len(turn[1])
                if n_context > options.most_tokens:
                    break
                turns.append((*turn, chance.expovariate(1 / options.tool_s)))
            name, shared = f"s{seed}.{group}.{place}", (len(system), len(task))
            agents.append(Agent(name, f"g{seed}.{group}", task, *shared, turns))
    return agents


@dataclass
class Placing:
    """Chooses a worker for each request, or leaves it to the router."""

    way: Way
    workers: list[str]
    chance: Random = field(default_factory=lambda: Random(0))
    n_asked: int = 0
    n_open: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self._cache_aware = CacheAware(self.chance)

    def options(self, agent: Agent) -> dict[str, str]:
        """What a request says of where it goes."""
        match self.way:
            case "chance":
                return {"worker": self.chance.choice(self.workers)}
            case "round_robin":
                self.n_asked += 1
                return {"worker": self.workers[self.n_asked % len(self.workers)]}
            case "least_loaded":
                return {"worker": min(self.workers, key=lambda each: self.n_open.get(each, 0))}
            case "cache_aware":
                beginnings = ("", agent.n_system), (agent.group, agent.n_task)
                path = [*beginnings, (agent.name, len(agent.context))]
                loads = {each: self.n_open.get(each, 0) for each in self.workers}
                return {"worker": self._cache_aware.choose(path, loads)}
            case "bus":
                return {}
            case "names":
                return {"session": agent.name, "group": agent.group}

    def count(self, said: dict[str, str], change: int) -> None:
        """A request to a worker begins or ends."""
        if worker := said.get("worker"):
            self.n_open[worker] = self.n_open.get(worker, 0) + change


async def run_agents(
    client: RolloutClient, agents: list[Agent], placing: Placing
) -> dict[str, float]:
    """All of them at once, until the last one is done."""
    await client.flush_cache()
    turn_s: list[float] = []
    n_cached = n_prompt = 0
    ended = dict.fromkeys(placing.workers, 0.0)
    sampled, computed = (dict.fromkeys(placing.workers, 0) for _ in range(2))

    async def one(agent: Agent) -> None:
        nonlocal n_cached, n_prompt
        for n_new, result, tool_s in agent.turns:
            began = time.perf_counter()
            said = placing.options(agent)
            placing.count(said, 1)
            rollout = await client.generate(
                agent.context,
                SamplingParams(max_new_tokens=n_new, ignore_eos=True),
                want=CACHED,
                deadline_s=DEADLINE_S,
                worker=said.get("worker", ""),
                session=said.get("session", ""),
                group=said.get("group", ""),
            )
            placing.count(said, -1)
            now, worker = time.perf_counter(), rollout.worker
            turn_s.append(now - began)
            cached = int(rollout.arrays["cached_tokens"][0])
            n_cached += cached
            n_prompt += rollout.n_prompt_tokens
            ended[worker] = now
            sampled[worker] += len(rollout.tokens)
            computed[worker] += rollout.n_prompt_tokens - cached
            agent.context = [*agent.context, *rollout.tokens.tolist(), *result]
            await asyncio.sleep(tool_s)

    first = time.perf_counter()
    await asyncio.gather(*map(one, agents))
    makespan_s = time.perf_counter() - first
    return {
        "makespan_s": makespan_s,
        "idle": 1 - statistics.mean(max(0, each - first) for each in ended.values()) / makespan_s,
        "most_sampled": max(sampled.values()) / statistics.mean(sampled.values()),
        "most_computed": max(computed.values()) / statistics.mean(computed.values()),
        "hit_rate": n_cached / n_prompt,
        "p50_turn_s": statistics.median(turn_s),
        "p99_turn_s": statistics.quantiles(turn_s, n=100)[98],
        "prompt_tokens": n_prompt,
        "new_tokens": sum(sampled.values()),
    }


async def placements(
    client: RolloutClient, workers: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """All ways in turns, in another order in each round, with the same agents in a round."""
    ways: list[Way] = [way for way in WAYS if way in options.ways]
    found: dict[Way, list[dict[str, float]]] = {way: [] for way in ways}
    with whole_rounds(found, options.rounds):
        for number in range(options.rounds + 1):
            turn = number % len(ways)
            for way in (*ways[turn:], *ways[:turn]):
                agents = agents_of(options, len(workers), number)
                row = await run_agents(client, agents, Placing(way, workers))
                found[way].append(row)
                _say(
                    f"round {number} of {options.rounds}: {way}: {row['makespan_s']:.1f} s, "
                    f"{row['hit_rate']:.0%} of prompts cached, engines idle for {row['idle']:.0%}, "
                    f"the busiest samples {row['most_sampled']:.2f} of the mean and computes "
                    f"{row['most_computed']:.2f}"
                )
    rows = {
        way: {name: round(statistics.median(row[name] for row in each[1:]), 3) for name in each[0]}
        for way, each in found.items()
    }

    def makespans(way: Way, other: Way) -> float:
        pairs = zip(found[way][1:], found[other][1:], strict=True)
        return round(statistics.median(a["makespan_s"] / b["makespan_s"] for a, b in pairs), 3)

    others: list[Way] = [way for way in ways if way in MAKESPAN_GOALS]
    goals = {other: makespans("names", other) <= MAKESPAN_GOALS[other] for other in others}
    return {
        "rounds": len(found["names"]) - 1,
        "agents": options.groups * options.group * len(workers),
        "ways": rows,
        "makespans_s": {
            way: [round(row["makespan_s"], 1) for row in each] for way, each in found.items()
        },
        **{
            f"makespan_to_{other}": {way: makespans(way, other) for way in ways} for other in others
        },
        "is_met": goals,
    }


# --------------------------------------------------------------------------------------------------


def engine_of(options: argparse.Namespace) -> dict[str, Any]:
    """Settings of each engine."""
    n_agents = options.groups * options.group
    kv_tokens = max(
        options.requests * (options.prompt_tokens + options.new_tokens),
        n_agents * options.most_tokens // 2,
    )
    memory = 0.42 if "throughput" in options.only else 0.8  # two engines on a GPU, or one
    engine = engine_options(options.device, options.requests, int(kv_tokens * 1.1) + 4096, memory)
    if options.tp > 1:
        engine["arguments"]["tp_size"] = options.tp
    return engine


@contextmanager
def engines_without_bus(
    options: argparse.Namespace, model: Path, n_engines: int
) -> Generator[list[Child]]:
    """An engine in a process of its own on the GPUs of each worker; they may still be starting."""
    engines: list[Child] = []
    try:
        for number in range(n_engines):
            engine = engine_of(options)
            if options.device == "cuda":
                engine["arguments"]["base_gpu_id"] = number * options.tp
            engines.append(Child("in_process.py", str(model), json.dumps(engine)))
        yield engines
    finally:
        for each in engines:
            each.end()


async def measure(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Start the fleet and measure what was asked for."""
    n_engines = options.engines or torch.cuda.device_count() // options.tp
    if n_engines < 1:
        raise SystemExit(f"{torch.cuda.device_count()} GPUs are too few for --tp {options.tp}")
    report: dict[str, Any] = {"shape": options.shape, "engines": n_engines, "tp": options.tp}
    up = rolloutbus.up(
        model=model,
        workers=n_engines,
        engine="sglang",
        engine_options={**engine_of(options), "report_prefixes": True},
    )
    is_compared = "throughput" in options.only
    with (
        engines_without_bus(options, model, n_engines) if is_compared else nullcontext([]) as alone
    ):
        async with up as fleet, rolloutbus.connect(fleet.address, name="bench") as client:
            workers = sorted(each.name for each in (await client.status()).workers)
            _say(f"the fleet is up: {', '.join(workers)}")
            if "agents" in options.only:
                report["agents"] = await placements(client, workers, options)
                if report["agents"]["rounds"] < options.rounds:
                    return report
            if is_compared:
                for each in alone:
                    await asyncio.to_thread(each.ask, {"kind": "hello"})
                _say("the engines without the bus are up")
                report["throughput"] = await throughput(client, workers, alone, options)
    return report


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Several SGLang engines behind one router")
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    parser.add_argument(
        "--only", nargs="+", choices=get_args(Measurement), default=get_args(Measurement)
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="agents: placements")
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--engines", type=int, default=0, help="0: as many as the GPUs allow")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of each engine")
    parser.add_argument("--rounds", type=int, default=8, help="beside the first")
    parser.add_argument("--requests", type=int, default=256, help="at once at an engine")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="throughput")
    parser.add_argument("--new-tokens", type=int, default=768, help="throughput")
    parser.add_argument("--groups", type=int, default=4, help="agents: for each engine")
    parser.add_argument("--group", type=int, default=16, help="agents of one task")
    parser.add_argument("--system-tokens", type=int, default=1000, help="agents: all share them")
    parser.add_argument("--task-tokens", type=int, default=600, help="agents: median")
    parser.add_argument("--turns", type=int, default=4, help="agents: median")
    parser.add_argument("--answer-tokens", type=int, default=100, help="agents: median of a turn")
    parser.add_argument("--result-tokens", type=int, default=300, help="agents: median of a tool")
    parser.add_argument("--tool-s", type=float, default=0.3, help="agents: mean of a tool")
    parser.add_argument("--most-tokens", type=int, default=4000, help="agents: of a context")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: at least 1, the first one is not counted")
    is_compared = "names" in options.ways and not {*options.ways}.isdisjoint(MAKESPAN_GOALS)
    if "agents" in options.only and not is_compared:
        others = " or ".join(MAKESPAN_GOALS)
        parser.error(f"--ways: names is compared with {others}: give it and one of them")
    if options.device == "cpu" and options.tp > 1:
        parser.error("--tp: an engine on the CPU is one; leave it out")
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        context = max(CONTEXT_TOKENS, options.most_tokens + SPARE_CONTEXT)
        write_shape(Path(folder), options.shape, context)
        try:
            report = asyncio.run(measure(options, Path(folder)))
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    print(json.dumps(report, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
