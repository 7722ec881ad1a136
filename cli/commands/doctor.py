"""`rolloutbus doctor`: what this machine, its packages and a model support, and why not."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rolloutbus.cli.fleet_check import fleet_findings
from rolloutbus.cli.options import AsJson, YourKey, example, not_empty
from rolloutbus.cli.terminal import ExitStatus, print_json, run
from rolloutbus.cli.verbs import Verbs
from rolloutbus.engine_worker.engines.survey.machine import Finding
from rolloutbus.launcher.plan import environment, python

STYLES = {"ok": "green", "note": "yellow", "missing": "dim", "failed": "red"}
TIMEOUT_S = 300.0
"""SGLang imports every model that it knows."""

app = Verbs()


@app.command(epilog=example("rolloutbus doctor --address tcp://10.0.0.1:7777 --key me.key"))
def doctor(
    *,
    model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Also look at this model directory.")
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            "--address",
            "-a",
            "--name",
            metavar="NAME|ENDPOINT",
            callback=not_empty,
            help="Also look at this running fleet, from here: router, streams, store and clocks.",
        ),
    ] = "",
    key: YourKey = "",
    as_json: AsJson = False,
) -> None:
    """Show what works here, what does not, and what to do about it.

    That is this machine, its packages and what engines can do with them; with --model a model, with
    --address every plane of a running fleet. Nothing has to be installed for it. Exit status 1 if
    something is there that does not work.
    """
    fleet = run(fleet_findings(address, key)) if address else []
    findings = [*look(str(model.absolute()) if model else ""), *fleet]
    if as_json:
        print_json(findings)
    else:
        Console().print(report(findings))
    if any(each.state == "failed" for each in findings):
        raise typer.Exit(ExitStatus.FAILED)


def look(model: str) -> list[Finding]:
    """Everything that was found; the last one is a failure if looking was cut short."""
    command = [*python("rolloutbus.engine_worker.engines.survey"), *filter(None, [model])]
    try:
        done = subprocess.run(
            command, env=environment(), capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        ended, out, complaint = f"no end after {TIMEOUT_S:g} s", late.stdout or b"", b""
    else:
        ended, out, complaint = f"ended with status {done.returncode}", done.stdout, done.stderr
        ended = ended if done.returncode else ""
    findings = [msgspec.json.decode(line, type=Finding) for line in out.splitlines()]
    if ended:
        last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        findings.append(Finding("survey", "itself", "failed", f"{ended}: {last}"))
    return findings


def report(findings: Sequence[Finding]) -> Table:
    """A line for each finding, under the names of their sections."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "state", "found"):
        table.add_column(name, overflow="fold")  # an address must not be cut
    section = ""
    for each in findings:
        if each.section != section:
            section = each.section
            table.add_row(Text(section, "bold"))
        table.add_row(f"  {each.name}", Text(each.state, STYLES[each.state]), Text(each.says))
    return table
