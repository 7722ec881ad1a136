"""How many more samples an hour does a trainer get from sampling ahead over the bus?

GRPO with a model of the 0.5B shape on two GPUs: one trains, the other one samples. Two loops take
turns in one run, each with a trainer and an SGLang engine of its own on the same two GPUs:

- synchronous: an `sglang.Engine` in the trainer's process. Sample a batch, train on it, give the
  engine the weights, one after another.
- over the bus: batches are sampled while the trainer trains on others and publishes. No token that
  is trained on lies more than `--bound` versions behind; a run in which one does is an error.
  What is under way when a turn ends is aborted, and was not counted.

Both train for real, on the same prompts with rollouts of the same lengths (see `rl_training.py`).
The first steps of a turn are not counted, over the bus all that were begun at once; both loops
count the same batches.

    python benchmarks/gpu/rl_loop.py --json --picture rl_loop.png
    python benchmarks/gpu/rl_loop.py --rounds 2 --bound 1

On a CPU (`--device cpu --shape tiny --groups 2 --group 4 --median 16 --longest 48`) SGLang starts
with the environment alone that `tests/sglang/fleets.py` makes.
"""

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from benchmarks.gpu.rl_sides import Turn, TurnReport
from benchmarks.gpu.rl_training import Load
from benchmarks.gpu.sglang_bus import SHAPES, VOCABULARY, Child, engine_options, write_shape

SIDES = ("synchronous", "bus")
COLOURS = {"sample": "#d0d0d0", "wait": "#d0d0d0", "train": "#4c78a8", "weights": "#f58518"}


def load_of(options: argparse.Namespace) -> Load:
    """What both loops do."""
    return Load(
        device=options.device,
        vocabulary=VOCABULARY[options.shape],
        groups=options.groups,
        group=options.group,
        prompt_tokens=options.prompt_tokens,
        median=options.median,
        sigma=options.sigma,
        longest=options.longest,
        micro_tokens=options.micro_tokens,
        bound=options.bound,
    )


def engine_of(options: argparse.Namespace) -> dict[str, Any]:
    """Settings of both engines; there are as many places as the bound lets begin."""
    slots = options.groups * options.group * (options.bound + 1)
    longest = options.prompt_tokens + options.longest
    return engine_options(options.device, slots, min(1_000_000, slots * longest + 4096), 0.4)


class Side:
    """One loop, and what it found in its turns."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace) -> None:
        load = msgspec.json.encode(load_of(options)).decode()
        self.name = name
        self._child = Child("rl_sides.py", name, str(folder), load, json.dumps(engine_of(options)))
        # Until all that began at once, to fill the pipeline, is trained on.
        self._n_settle: int = 1 + (options.bound if name == "bus" else 0)
        # Whoever settles sooner begins later, so that both count the same batches.
        self._n_ahead: int = 0 if name == "bus" else options.bound * options.groups
        self._n_steps: int = self._n_settle + options.steps
        self.turns: list[TurnReport] = []

    def take_turn(self, number: int) -> TurnReport:
        """Have it train."""
        # Groups of no turn come back: a prompt that the engine knows is not computed again.
        turn = Turn(self._n_steps, number * 100_000 + self._n_ahead)
        report = msgspec.convert(self._child.ask(msgspec.to_builtins(turn)), TurnReport)
        self.turns.append(report)
        return report

    def rate(self, turn: TurnReport) -> float:
        """Rollouts an hour, after the first steps."""
        rollouts = sum(step.rollouts for step in turn.steps[self._n_settle :])
        return rollouts * 3600 / self._seconds(turn)

    def row(self) -> dict[str, Any]:
        """Medians over all turns but the first."""
        counted = self.turns[1:]
        steps = [step for turn in counted for step in turn.steps[self._n_settle :]]
        shares = self.shares()[1:]
        seconds = [self._seconds(turn) / (self._n_steps - self._n_settle) for turn in counted]
        return {
            "samples_per_hour": round(statistics.median(self.rate(turn) for turn in counted)),
            "step_s": round(statistics.median(seconds), 2),
            "share": {
                what: round(statistics.median(each.get(what, 0.0) for each in shares), 3)
                for what in shares[-1]
            },
            "tokens_per_rollout": round(
                sum(step.tokens for step in steps) / sum(step.rollouts for step in steps)
            ),
            "oldest_token": max(turn.oldest for turn in counted),
            "ratio_error": round(statistics.median(step.ratio_error for step in steps), 4),
            "memory_retries": sum(step.memory_retries for step in steps),
            "first_reward": round(self.turns[0].steps[0].reward, 3),
            "last_reward": round(self.turns[-1].steps[-1].reward, 3),
            "last_turn": self._told(self.turns[-1]),
        }

    def shares(self) -> list[dict[str, float]]:
        """What the trainer's time went into, turn by turn."""
        return [self._shares(turn) for turn in self.turns]

    def end(self) -> None:
        """Have it end, and its engine."""
        self._child.end()

    def _shares(self, turn: TurnReport) -> dict[str, float]:
        found: dict[str, float] = {}
        for what, began, ended in self._told(turn):
            found[what] = found.get(what, 0.0) + ended - began
        return {what: seconds / self._seconds(turn) for what, seconds in found.items()}

    def _told(self, turn: TurnReport) -> list[tuple[str, float, float]]:
        """What was done from when to when, in seconds since the first step that counts."""
        since = turn.ends[self._n_settle - 1]
        return [
            (each.what, round(each.began - since, 3), round(each.ended - since, 3))
            for each in turn.spans
            if each.began >= since
        ]

    def _seconds(self, turn: TurnReport) -> float:
        return turn.ends[-1] - turn.ends[self._n_settle - 1]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both loops in turns; who came first in one round comes last in the next.

    Ctrl-C ends it early: what is told then is of the rounds that both have ended.
    """
    with ExitStack() as stack:
        sides = [Side(name, folder, options) for name in SIDES]
        for side in sides:
            stack.callback(side.end)
        try:
            _take_turns(sides, options.rounds)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what was found is told in any case
            n_ended = min(len(side.turns) for side in sides)
            if n_ended < 2:
                _say("stopped before a round that counts had ended")
                raise SystemExit(130) from None
            _say(f"stopped after {n_ended - 1} of {options.rounds} rounds")
            for side in sides:
                del side.turns[n_ended:]
    return _report(options, sides)


def _take_turns(sides: list[Side], n_rounds: int) -> None:
    for number in range(n_rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            rate = side.rate(side.take_turn(number))
            shares = ", ".join(f"{what} {part:.0%}" for what, part in side.shares()[-1].items())
            _say(f"round {number} of {n_rounds}: {side.name}: {rate:,.0f}/h; {shares}")


def _report(options: argparse.Namespace, sides: list[Side]) -> dict[str, Any]:
    plain, bus = sides
    pairs = zip(plain.turns[1:], bus.turns[1:], strict=True)
    ratios = [bus.rate(over) / plain.rate(alone) for alone, over in pairs]
    return {
        "shape": options.shape,
        "batch": f"{options.groups} x {options.group}",
        "new_tokens": f"lognormal, median {options.median}, sigma {options.sigma}, "
        f"at most {options.longest}",
        "bound": options.bound,
        "rounds": len(ratios),
        "steps": options.steps,
        "bus_to_synchronous": round(statistics.median(ratios), 3),
        "ratios": [round(each, 3) for each in ratios],
        **{name: side.row() for name, side in zip(SIDES, sides, strict=True)},
    }


def draw(report: dict[str, Any], path: Path) -> None:
    """What each trainer did in its last turn, and the samples of an hour."""
    # Only here: a GPU host may lack it, and its backend is chosen before the rest is imported.
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = cast("Any", plt).subplots(figsize=(9, 2.2))  # untyped
    for place, name in enumerate(SIDES):
        for what, began, ended in report[name]["last_turn"]:
            axes.barh(place, ended - began, left=began, color=COLOURS[what], edgecolor="white")
    labels = [f"{name}\n{report[name]['samples_per_hour']:,} samples/h" for name in SIDES]
    axes.set_yticks(range(len(SIDES)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds of {report['steps']} training steps")
    meanings = {"waits for samples": "wait", "trains": "train", "weights to the engine": "weights"}
    bars = [axes.barh(0, 0, color=COLOURS[what]) for what in meanings.values()]
    axes.legend(
        bars, [*meanings], ncols=3, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0)
    )
    figure.savefig(path, bbox_inches="tight", dpi=150)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="Asynchronous GRPO over the bus against a synchronous loop, on two GPUs"
    )
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--groups", type=int, default=16, help="of a training step")
    parser.add_argument("--group", type=int, default=16, help="rollouts of one prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--median", type=int, default=384, help="new tokens of a rollout")
    parser.add_argument("--sigma", type=float, default=0.8, help="of their lognormal lengths")
    parser.add_argument("--longest", type=int, default=1536)
    parser.add_argument("--micro-tokens", type=int, default=8192, help="of one forward pass")
    parser.add_argument("--bound", type=int, default=2, help="versions a token may lie behind")
    parser.add_argument("--steps", type=int, default=3, help="of a turn that are counted")
    parser.add_argument("--rounds", type=int, default=8, help="beside the first")
    parser.add_argument("--picture", type=Path, help="a file for what the trainers did")
    options = parser.parse_args(arguments)
    if options.picture and find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib: pip install matplotlib")
    if options.group < 2:
        parser.error("--group: a rollout is judged by the others of its group: at least 2")
    for name, least in {"groups": 1, "bound": 0, "steps": 1, "rounds": 1}.items():
        if getattr(options, name) < least:
            parser.error(f"--{name}: at least {least}")
    if options.device == "cuda" and (n_gpus := torch.cuda.device_count()) < 2:
        parser.error(f"two GPUs are needed, and torch sees {n_gpus}; --device cpu does without")
    with tempfile.TemporaryDirectory(prefix="rl-loop-") as folder:
        write_shape(Path(folder), options.shape)
        report = measure(options, Path(folder))
    if options.picture:
        draw(report, options.picture)
    print(json.dumps(report, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
