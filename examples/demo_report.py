"""What the demo shows while it runs, and the table it ends with."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Self

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rolloutbus.errors import SettingsError
from rolloutbus.types import WorkerStatus

# pyright: reportUnknownMemberType=false
# matplotlib's stubs leave parameters untyped.


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
    """Rollouts trained on, group by group: `examples.retrain` makes the step again."""


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
    """Rollouts with an ending seen by an observer that listens to the workers, not the client."""
    duplicated: int
    """Rollouts whose ending that observer saw again."""
    resumed: int
    """Rollouts that went on elsewhere, tokens kept, after their worker was killed."""
    dropped: int
    """Groups that finished too late to be trained on."""
    killed: str
    """Name of the worker that was killed on purpose."""
    killed_at_step: int
    """0: no worker was."""
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


class DemoDirectory:
    """`runs/<time>/` of one run."""

    def __init__(self, parent: Path, seed: int) -> None:
        """Make it.

        Raises:
            SettingsError: nothing can be written there.
        """
        name = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-seed{seed}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for number in count(1):
                self.path = parent / (name if number == 1 else f"{name}-{number}")
                with suppress(FileExistsError):  # another run began in the same second
                    self.path.mkdir()
                    break
        except OSError as error:
            raise SettingsError(f"output: cannot write {parent}: {error.strerror}") from error
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


BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60
LINE_EVERY_STEPS = 10
"""Where no terminal can be redrawn, a line is printed now and then."""


class DemoView:
    """Live progress on a terminal, lines elsewhere, nothing when quiet. A context manager."""

    def __init__(self, n_steps: int, *, quiet: bool) -> None:
        self._console = Console(quiet=quiet)
        self._is_live = self._console.is_terminal and not quiet
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._n_steps = n_steps
        self._steps: list[StepMetrics] = []
        self._workers: Sequence[WorkerStatus] = ()

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._live.stop()

    def say(self, sentence: str) -> None:
        """Print something that stays."""
        self._console.print(sentence, soft_wrap=True)

    def show_step(self, metrics: StepMetrics) -> None:
        """Show the newest step."""
        self._steps.append(metrics)
        if not self._is_live and metrics.step % LINE_EVERY_STEPS == 0:
            self._console.print(_line(metrics), soft_wrap=True)
        self._refresh()

    def show_workers(self, workers: Sequence[WorkerStatus]) -> None:
        """Show the state of the fleet."""
        self._workers = workers
        self._refresh()

    def show_summary(self, summary: DemoSummary) -> None:
        """Print the table at the end."""
        table = Table(title="asynchronous RL over the bus", show_header=False)
        for name, text in _summary_rows(summary):
            table.add_row(name, text)
        self._console.print(table)

    def _refresh(self) -> None:
        if self._is_live and self._steps:
            parts = [_curve(self._steps), _numbers(self._steps), _fleet(self._workers)]
            title = f"step {self._steps[-1].step} of {self._n_steps}"
            self._live.update(Panel(Group(*parts), title=title), refresh=True)


def _line(metrics: StepMetrics) -> str:
    return (
        f"step {metrics.step:4d}  reward {metrics.reward:.2f}  version {metrics.version}"
        f"  staleness {metrics.staleness_mean:.1f} (max {metrics.staleness_max})"
        f"  {metrics.tokens_per_s:.0f} tokens/s  stall {stall_ms_p50([metrics]):.1f} ms"
    )


def _curve(steps: Sequence[StepMetrics]) -> Text:
    shown = steps[:: -(-len(steps) // CURVE_WIDTH)]  # the whole run, thinned out to fit
    heights = (min(int(each.reward * len(BARS)), len(BARS) - 1) for each in shown)
    curve = "".join(BARS[height] for height in heights)
    return Text(f"reward {steps[-1].reward:.2f}  {curve}", style="green")


def _numbers(steps: Sequence[StepMetrics]) -> Table:
    newest = steps[-1]
    table = Table.grid(padding=(0, 3))
    table.add_row("version", str(newest.version))
    table.add_row(
        "staleness", f"{newest.staleness_mean:.2f} on average, {newest.staleness_max} max"
    )
    table.add_row("sampled", f"{newest.tokens_per_s:.0f} tokens/s")
    table.add_row("stall", f"{stall_ms_p50([newest]):.1f} ms for the last update")
    table.add_row("trained", f"{newest.train_s:.2f} s, waited {newest.wait_s:.2f} s for rollouts")
    return table


def _fleet(workers: Sequence[WorkerStatus]) -> Table:
    table = Table("worker", "state", "version", "running", box=None, padding=(0, 3, 0, 0))
    for worker in workers:
        running = f"{worker.n_running}/{worker.slots}"
        table.add_row(worker.name, worker.state, str(worker.version), running)
    return table


def _summary_rows(summary: DemoSummary) -> list[tuple[str, str]]:
    return [
        ("reward, first ten steps", f"{summary.reward_first:.3f}"),
        ("reward, held-out words", f"{summary.reward_last:.3f}"),
        ("  best constant answer", f"{summary.reward_constant:.3f}"),
        ("updates published", f"{summary.versions}"),
        ("stall per update, median", f"{summary.stall_ms_p50:.1f} ms"),
        ("rollouts", f"{summary.rollouts_finished} of {summary.rollouts_requested} finished"),
        ("  lost", f"{summary.lost}"),
        (
            "  sampled twice",
            f"{summary.duplicated} of {summary.witnessed} observed endings",
        ),
        (
            f"  resumed after killing {summary.killed or 'no worker'}",
            f"{summary.resumed} ({summary.killed_mid_generation} were in mid-generation)",
        ),
        ("trained tokens at least one update old", f"{summary.stale_token_share:.0%}"),
        ("oldest trained token", f"{summary.max_staleness} updates"),
        ("training time overlapped by rollouts", f"{summary.overlap:.0%}"),
        ("time", f"{summary.seconds:.0f} s, {summary.tokens} tokens"),
        *(("not shown", each) for each in summary.not_shown),
        ("files", summary.run_directory),
    ]
