"""What a run of the demo leaves behind: its summary, and `config.json`, `metrics.jsonl`, a picture.

`runs/<time>/` also holds the model that the run started from.
"""

# pyright: reportUnknownMemberType=false
# matplotlib's stubs leave parameters untyped.

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One training step; one line of `metrics.jsonl`."""

    step: int
    version: int
    """Of the weights that this step started from."""
    elapsed_s: float
    reward: float
    """Mean of the rollouts trained on: 0 to 1."""
    n_tokens: int
    staleness_mean: float
    staleness_max: int
    """Updates between the sampling of a token and its use, over the tokens trained on."""
    n_stale_tokens: int
    tokens_per_s: float
    """Sampled by all engines since the step before."""
    wait_s: float
    """For rollouts."""
    train_s: float
    busy_s: float
    """Part of `train_s` during which rollouts were in progress."""
    publish_s: float
    stall_ms: dict[str, float]
    """How long the update held up generation, per worker."""
    loss: float
    clipped_share: float
    ratio_error: float
    rids: list[str]
    """Rollouts trained on, group by group: `examples.offline` makes the step again."""


@dataclass(frozen=True, slots=True)
class DemoSummary:
    """What a run came to. Printed as one JSON object by `rolloutbus demo --json`."""

    reward_first: float
    """Mean of the first ten steps."""
    reward_last: float
    """Mean on held-out words after the training."""
    reward_constant: float
    """Best answer to the held-out words that does not look at the prompt."""
    steps: int
    versions: int
    """Published updates."""
    rollouts_requested: int
    rollouts_finished: int
    lost: int
    witnessed: int
    """Rollouts whose ending a stranger saw, who listens to the workers and not to the client."""
    duplicated: int
    """Rollouts whose ending that stranger saw again."""
    resumed: int
    """Rollouts that went on elsewhere, tokens kept, after their worker was killed."""
    dropped: int
    """Groups that finished too late to be trained on."""
    killed: str
    """Name of the worker that was killed on purpose."""
    killed_at_step: int
    """0: nobody was."""
    killed_mid_generation: int
    """Rollouts that it was in the middle of."""
    max_staleness: int
    stale_token_share: float
    """Share of the trained tokens that were at least one update old."""
    overlap: float
    """Share of the training time during which rollouts were in progress."""
    stall_ms_p50: float
    """Median over updates and workers."""
    tokens: int
    seconds: float
    run_directory: str
    not_shown: list[str]
    """What the run was to show and did not, each with the reason; empty: all was shown."""

    def as_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


class RunDirectory:
    """`runs/<time>/` of one run."""

    def __init__(self, parent: Path, seed: int) -> None:
        name = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-seed{seed}"
        parent.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            self.path = parent / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):  # another run began in the same second
                self.path.mkdir()
                break
        self._metrics = self.path / "metrics.jsonl"

    def write_config(self, config: dict[str, Any]) -> None:
        """Keep what the run was asked for."""
        (self.path / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")

    def append(self, metrics: StepMetrics) -> None:
        """Keep one step; readable while the run goes on."""
        with self._metrics.open("a") as file:
            file.write(json.dumps(asdict(metrics)) + "\n")

    def draw_rewards(self, steps: Sequence[StepMetrics], summary: DemoSummary) -> None:
        """Write `reward.png`: the rewards step by step, and what to compare them with."""
        figure = Figure(figsize=(7, 4), layout="tight")
        axes = figure.add_subplot()
        axes.plot(
            [each.step for each in steps], [each.reward for each in steps], label="trained on"
        )
        last = steps[-1].step if steps else 0
        axes.plot([last], [summary.reward_last], "o", label="held out, after training")
        axes.axhline(
            summary.reward_constant, linestyle=":", color="gray", label="best constant answer"
        )
        if summary.killed_at_step:
            axes.axvline(
                summary.killed_at_step,
                color="tab:red",
                linewidth=1,
                label=f"{summary.killed} killed",
            )
        axes.set(xlabel="training step", ylabel="mean reward", ylim=(0, 1.02))
        axes.legend(loc="center left")
        figure.savefig(self.path / "reward.png", dpi=120)


def stall_ms_p50(steps: Sequence[StepMetrics]) -> float:
    """Median stall over updates and workers; 0 when nothing was published."""
    stalls = [stall for each in steps for stall in each.stall_ms.values()]
    return float(np.median(stalls)) if stalls else 0.0
