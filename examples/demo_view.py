"""What the demo shows while it runs, and the table it ends with."""

from collections.abc import Sequence
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rolloutbus.examples.demo_report import DemoSummary, StepMetrics, stall_ms_p50
from rolloutbus.types import WorkerStatus

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
        ("  sampled twice", f"{summary.duplicated} of {summary.witnessed} that a stranger saw end"),
        (
            f"  resumed after killing {summary.killed or 'nobody'}",
            f"{summary.resumed} ({summary.killed_mid_generation} were in mid-generation)",
        ),
        ("trained tokens at least one update old", f"{summary.stale_token_share:.0%}"),
        ("oldest trained token", f"{summary.max_staleness} updates"),
        ("training time overlapped by rollouts", f"{summary.overlap:.0%}"),
        ("time", f"{summary.seconds:.0f} s, {summary.tokens} tokens"),
        *(("not shown", each) for each in summary.not_shown),
        ("files", summary.run_directory),
    ]
