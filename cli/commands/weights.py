"""`rolloutbus weights`: what the workers really hold."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rolloutbus.bus.weights.tensor_files import header_of
from rolloutbus.bus.wire.messages.weights import Tensor
from rolloutbus.cli.options import Address, AsJson, Deadline, YourKey, example
from rolloutbus.cli.terminal import ExitStatus, ask, fail, print_json
from rolloutbus.cli.verbs import Verbs
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.weight_queries import (
    ActiveTensor,
    WeightsReport,
    WorkerWeights,
)

MAX_SHOWN = 3
"""Names of tensors in one cell."""
Names = Annotated[
    list[str] | None, typer.Argument(metavar="NAME", help="Of tensors. Default: all.")
]
Worker = Annotated[
    str, typer.Option("--worker", metavar="NAME", help="Only this one. Default: all.")
]

app = Verbs()
weights = Verbs(help="Check and read the weights that workers have active.", no_args_is_help=True)
app.add_typer(weights, name="weights")


@weights.command(epilog=example("rolloutbus weights check"))
def check(
    names: Names = None,
    address: Address = "",
    key: YourKey = "",
    worker: Worker = "",
    as_json: AsJson = False,
    deadline: Deadline = 120.0,
) -> None:
    """Compare every tensor with the store's, by digest; exit status 1 on a difference."""
    target = worker or "fleet"
    report = ask(
        address,
        key,
        lambda client: client.check_weights(names or [], target=target, deadline_s=deadline),
    )
    if as_json:
        print_json(as_plain(report))
    else:
        Console(highlight=False).print(as_table(report))
    if not report.is_ok:
        raise typer.Exit(ExitStatus.FAILED)


@weights.command(epilog=example("rolloutbus weights get lm_head.weight -o head.safetensors"))
def get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the tensor.")],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="A safetensors file.")
    ],
    address: Address = "",
    key: YourKey = "",
    worker: Annotated[
        str, typer.Option("--worker", metavar="NAME", help="Whose. Default: the first one's.")
    ] = "",
    deadline: Deadline = 120.0,
    as_json: AsJson = False,
) -> None:
    """Write one tensor to a file, as a worker has it active."""
    holder, tensor = ask(address, key, lambda client: _get(client, name, worker, deadline))
    place = Tensor(tensor.name, tensor.dtype, tensor.shape, 0, len(tensor.content))
    try:
        with output.open("wb") as file:
            file.write(header_of([place]))
            file.write(tensor.content.data)
    except OSError as error:
        fail(f"cannot write {output}: {error.strerror}", ExitStatus.FAILED)
    shape = list(tensor.shape)
    if as_json:
        facts = {"dtype": tensor.dtype, "shape": shape, "version": tensor.version}
        print_json({"output": str(output), "name": name, "worker": holder, **facts})
        return
    sys.stdout.write(f"{output}: {name} {tensor.dtype} {shape} of {holder} v{tensor.version}\n")


def as_plain(report: WeightsReport) -> dict[str, object]:
    """For JSON."""
    return {
        "is_ok": report.is_ok,
        "workers": {
            name: {**msgspec.to_builtins(each), "is_ok": each.is_ok}
            for name, each in report.by_worker.items()
        },
        "errors": {name: str(error) for name, error in report.errors.items()},
        "silent": report.silent,
    }


def as_table(report: WeightsReport) -> Table:
    """For people: one row per worker."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("worker", "policy", "version", "tensors", "compared with", "result"):
        table.add_column(column)
    for name, each in sorted(report.by_worker.items()):
        table.add_row(
            name,
            each.policy,
            str(each.version),
            str(each.n_tensors),
            "the store" if each.is_in_store else "the others",
            Text(_verdict(each), "green" if each.is_ok else "red"),
        )
    for name, error in sorted(report.errors.items()):
        table.add_row(name, "", "", "", "", Text(str(error), "red"))
    for name in sorted(report.silent):
        table.add_row(name, "", "", "", "", Text("no answer", "red"))
    return table


def _verdict(found: WorkerWeights) -> str:
    parts = [
        f"{word} {_shown(names)}"
        for word, names in (
            ("different:", found.different),
            ("missing:", found.missing),
            ("infinity or NaN in", list(found.not_finite)),
            ("all zero:", found.zero),
        )
        if names
    ]
    return "; ".join(parts if not found.is_ok else ["right", *parts])


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more


async def _get(
    client: RolloutClient, name: str, worker: str, deadline_s: float
) -> tuple[str, ActiveTensor]:
    workers = sorted(each.name for each in (await client.status()).workers)
    if not worker and not workers:
        fail("there are no workers", ExitStatus.FAILED)
    holder = worker or workers[0]
    return holder, await client.get_weights(name, holder, deadline_s=deadline_s)
