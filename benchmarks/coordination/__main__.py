"""A model of asynchronous RL over 32 to 512 engines: what placement and coordination are worth.

Engines are simulated in virtual time, with step times that fit what one H200 with SGLang took. The
bus is the shipped router core; beside it stand balancers as one would put them before the engines.

Two questions. *Agents*: a batch of multi-turn agents, how soon is it done, and how much of the
prompts was cached? *RL*: how many tokens an hour does a trainer get that bounds the staleness of
its samples, with requests placed by load, and with policies that know of that bound?

A model has no network, no Python and no noise: it compares policies, and does not say how fast a
fleet is. No GPU is needed.
"""

import argparse
import json
import statistics
import time as wall_clock
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from benchmarks.coordination.agents import AgentLoad, run_agents
from benchmarks.coordination.engines import SHAPES
from benchmarks.coordination.fleets import WAYS
from benchmarks.coordination.rl_loop import WARM_UP_STEPS, RlLoad, RlPolicy, RlRun

Row = dict[str, Any]
EXAMPLES = """examples:
  python -m benchmarks.coordination --json
  python -m benchmarks.coordination --only agents --engines 32 128 --seeds 3
  python -m benchmarks.coordination --only rl --engines 512 --staleness 1 --policies bus bus_moves
"""
GROUPS_PER_ENGINE = 10
"""Of agents: 160 agents at each engine."""
BATCH_PER_ENGINE = 4
"""Groups of a trainer's batch: 64 samples for each engine."""
TO_LEAST_LOADED, TO_CACHE_AWARE, TO_BASELINE = 0.8, 1.0, 1.3
"""Goals: makespan by that of others, at most; trained tokens an hour by those of others, at
least."""
KEPT_FROM = 1.1
"""A policy is built into the product from this ratio on."""
BASELINES = ("least_loaded_drop", "least_loaded_wait")
POLICIES = {
    "least_loaded_drop": RlPolicy("least_loaded", "drop"),
    "least_loaded_wait": RlPolicy("least_loaded", "wait"),
    "bus": RlPolicy("bus", "wait"),
    "bus_groups": RlPolicy("bus_names", "wait"),
    "bus_moves": RlPolicy("bus", "wait", moves=True),
    "bus_relief": RlPolicy("bus", "wait", relieves=True),
    "pool": RlPolicy("least_loaded", "wait", pool_share=0.125),
    "redundant_2": RlPolicy("bus", "wait", n_extra=2),
    "redundant_2_drop": RlPolicy("bus", "drop", n_extra=2),
}
SCENES: dict[str, dict[str, float]] = {
    "even": {},
    "slow": {"slow_share": 0.125},
    "join": {"late_share": 0.25},
}
"""All engines alike; an eighth of them becomes three times slower; a quarter joins later."""


def agent_rows(options: argparse.Namespace) -> list[Row]:
    """One for each fleet and way: medians over the seeds, and ratios of the makespans."""
    rows: list[Row] = []
    for n_engines in options.engines:
        load = AgentLoad(
            n_engines, GROUPS_PER_ENGINE * n_engines, options.model, turns=options.turns
        )
        runs = {
            way: [run_agents(load, way, seed) for seed in _seeds(options)] for way in options.ways
        }
        for way, found in runs.items():
            row: Row = {"engines": n_engines, "way": way} | _medians(found)
            for other in ("least_loaded", "cache_aware"):
                if other in runs:
                    row[f"to_{other}"] = _ratios(found, runs[other], "makespan_s")
            rows.append(row)
            _tell(row, options)
    return rows


def rl_rows(options: argparse.Namespace) -> list[Row]:
    """One for each fleet, bound, scene and policy: medians over the seeds, and ratios."""
    rows: list[Row] = []
    for n_engines in options.engines:
        for staleness in options.staleness:
            for scene in options.scenes:
                n_batch = BATCH_PER_ENGINE * n_engines
                load = RlLoad(n_engines, n_batch, staleness, options.steps, model=options.model)
                load = replace(load, **SCENES[scene])
                head = {"engines": n_engines, "staleness": staleness, "scene": scene}
                rows += _rl_rows_of(load, head, options)
    return rows


def _rl_rows_of(load: RlLoad, head: Row, options: argparse.Namespace) -> list[Row]:
    runs: dict[str, list[Row]] = {}
    rows: list[Row] = []
    for name in options.policies:
        runs[name] = [RlRun(load, POLICIES[name], seed).run() for seed in _seeds(options)]
        row = head | {"policy": name} | _medians(runs[name])
        for other in (each for each in BASELINES if each in runs):
            row[f"to_{other}"] = _ratios(runs[name], runs[other], "trained_tokens_per_h")
        rows.append(row)
        _tell(row, options)
    return rows


def _seeds(options: argparse.Namespace) -> Iterable[int]:
    return range(options.seed, options.seed + options.seeds)


def _medians(runs: list[Row]) -> Row:
    return {name: statistics.median(each[name] for each in runs) for name in runs[0]}


def _ratios(ours: list[Row], theirs: list[Row], name: str) -> list[float]:
    """Median, least and most over the seeds, each seed with itself."""
    found = [a[name] / b[name] for a, b in zip(ours, theirs, strict=True)]
    return [round(pick(found), 3) for pick in (statistics.median, min, max)]


def verdicts(agents: list[Row], rl: list[Row]) -> Row:
    """The goals, each by the worst of its rows; only those that the rows can tell."""
    told: Row = {}
    own = [row for row in agents if row["way"] in ("bus_names", "bus_both")]
    for other, goal in (("least_loaded", TO_LEAST_LOADED), ("cache_aware", TO_CACHE_AWARE)):
        found = [row[f"to_{other}"][0] for row in own if f"to_{other}" in row]
        if found:
            told[f"makespan_to_{other}"] = {
                "ratio": max(found),
                "goal": goal,
                "is_met": max(found) <= goal,
            }
    for scene in SCENES:
        found = [
            min(row[f"to_{each}"][0] for each in BASELINES)
            for row in rl
            if row["policy"] == "bus_moves"
            and row["scene"] == scene
            and all(f"to_{each}" in row for each in BASELINES)
        ]
        if found:
            told[f"trained_tokens_{scene}"] = {
                "ratio": min(found),
                "goal": TO_BASELINE,
                "is_met": min(found) >= TO_BASELINE,
                "is_kept": min(found) >= KEPT_FROM,
            }
    return told


def _tell(row: Row, options: argparse.Namespace) -> None:
    if not options.json:
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


def _number_from(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"a whole number from {least} on, not {text!r}")
        return int(text)

    return number


_natural, _positive, _steps = _number_from(0), _number_from(1), _number_from(WARM_UP_STEPS + 1)


def parser_of_options() -> argparse.ArgumentParser:
    """What one may ask for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coordination",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="only one JSON object, as last line")
    parser.add_argument("--only", choices=["agents", "rl"], help="one of the two questions")
    parser.add_argument("--engines", type=_positive, nargs="+", default=[32], help="fleets")
    parser.add_argument("--model", choices=[*SHAPES], default="7b", help="whose step times")
    parser.add_argument("--seed", type=_natural, default=0, help="the first one")
    parser.add_argument("--seeds", type=_positive, default=3, help="how many")
    agents = parser.add_argument_group("agents")
    agents.add_argument(
        "--ways",
        nargs="+",
        choices=[*WAYS],
        default=[*WAYS],
        metavar="WAY",
        help=f"all, or some of {', '.join(WAYS)}",
    )
    agents.add_argument("--turns", type=_positive, default=8, help="of an agent, the median")
    rl = parser.add_argument_group("RL")
    rl.add_argument(
        "--staleness", type=_natural, nargs="+", default=[1, 3], help="bounds, in versions"
    )
    rl.add_argument("--steps", type=_steps, default=12, help="of the trainer, 4 to warm up")
    for option, metavar, known in (
        ("--scenes", "SCENE", [*SCENES]),
        ("--policies", "POLICY", [*POLICIES]),
    ):
        rl.add_argument(
            option,
            nargs="+",
            choices=known,
            default=known,
            metavar=metavar,
            help=f"all, or some of {', '.join(known)}",
        )
    return parser


def measure(options: argparse.Namespace) -> Row:
    """All rows and the verdicts."""
    begun_at = wall_clock.perf_counter()
    questions: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
        "agents": agent_rows,
        "rl": rl_rows,
    }
    rows = {
        name: ask(options) if options.only in (None, name) else []
        for name, ask in questions.items()
    }
    goals = verdicts(rows["agents"], rows["rl"])
    took_s = round(wall_clock.perf_counter() - begun_at, 1)
    return rows | {"goals": goals, "seed": options.seed, "seeds": options.seeds, "took_s": took_s}


def main() -> None:
    """Run and print."""
    print(json.dumps(measure(parser_of_options().parse_args())))


if __name__ == "__main__":
    main()
