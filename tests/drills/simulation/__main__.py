"""`make sim`: the shipped cores under virtual time, seed after seed."""

import sys
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from rolloutbus.cli.options import AsJson, example
from rolloutbus.cli.terminal import ExitStatus
from tests.drills.simulation import campaign
from tests.drills.simulation.mutants import MUTANTS
from tests.drills.simulation.single_faults import Coverage, run_single_faults

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command(epilog=example('make sim ARGS="--seeds 200 --jobs 2"'))
def sim(  # noqa: PLR0917 - typer makes options of them
    seeds: Annotated[int, typer.Option(min=0, help="How many.")] = 2000,
    start: Annotated[int, typer.Option(min=0, help="The first one.")] = 0,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes.")] = 1,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Also switch off one protection after the other.")
    ] = False,
    mutant_seeds: Annotated[int, typer.Option(min=1, help="Most seeds per mutant.")] = 600,
    single_faults: Annotated[
        bool, typer.Option("--single-faults", help="Also each fault after each message of a run.")
    ] = False,
    stride: Annotated[int, typer.Option(min=1, help="Of --single-faults: each n-th message.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Run only this one.")] = None,
    story: Annotated[bool, typer.Option("--story", help="Tell what happened in --seed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Search for lost, doubled or wrong results under simulated crashes, cuts and freezes.

    Each seed is a fleet of four workers and three clients, 60 requests, a weight update and a
    dozen faults within 120 virtual seconds; some have a router and its standby. The same seed is
    the same run. Exit status 1 if an oracle was broken, if a kind of event was never seen, or if a
    mutant was not found. `--seeds 0` leaves only what else was asked for.
    """
    if seed is not None:
        start, seeds, jobs = seed, 1, 1
    summary = (
        campaign.run_seeds(start, seeds) if jobs == 1 else campaign.run_parallel(start, seeds, jobs)
    )
    table = range(start, start + mutant_seeds)
    found = [campaign.detect(mutant, table) for mutant in MUTANTS] if mutants else []
    coverage = run_single_faults(stride) if single_faults else Coverage(0)
    shown = msgspec.to_builtins(summary)
    detections = {each.mutant: msgspec.to_builtins(each) for each in found}
    if as_json:
        shown |= {"mutants": detections} if mutants else {}
        shown |= {"single_faults": msgspec.to_builtins(coverage)} if single_faults else {}
        sys.stdout.write(msgspec.json.encode(shown).decode() + "\n")
    else:
        _print_tables(shown, detections)
        if single_faults:
            _print_coverage(msgspec.to_builtins(coverage))
    if story and seed is not None:
        sys.stdout.write("\n".join(campaign.tell(seed)) + "\n")
    is_enough = seed is not None or not seeds or summary.has_passed
    n_violations = summary.violations + coverage.violations
    if n_violations or not is_enough or not all(each.found_in for each in found):
        raise typer.Exit(ExitStatus.FAILED)


def _print_tables(summary: dict[str, Any], detections: dict[str, dict[str, Any]]) -> None:
    console = Console(highlight=False)
    console.print(
        f"{summary['seeds']} seeds in {summary['seconds']} s: {summary['violations']} violations, "
        f"{summary['requests']} requests, "
        f"{summary['executions_per_request']} executions per request"
    )
    events = (f"{event} {count}" for event, count in summary["sometimes"].items())
    console.print(", ".join(events), style="dim", markup=False)
    if summary["never_seen"]:
        console.print(f"never seen: {', '.join(summary['never_seen'])}", style="yellow")
    for failure in summary["failing_seeds"]:
        console.print(f"seed {failure['seed']}", style="red")
        console.print("\n".join(failure["violations"] + failure["story"]), markup=False)
    if detections:
        console.print(_mutant_table(detections))


def _print_coverage(coverage: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(
        f"{coverage['runs']} single faults, after {coverage['moments']} messages, "
        f"in {coverage['seconds']} s: {coverage['violations']} violations"
    )
    for each in coverage["failing"]:
        console.print(f"{each['fault']} at {each['at_s']} s", style="red")
        console.print("\n".join(each["violations"]), markup=False)


def _mutant_table(detections: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("protection off", "found in", "first seed", "by"):
        table.add_column(name)
    for mutant, each in detections.items():
        by = ", ".join(each["oracles"])
        table.add_row(mutant, f"{each['found_in']}/{each['seeds']}", str(each["first_seed"]), by)
    return table


if __name__ == "__main__":
    app()
