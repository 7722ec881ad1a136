"""`rolloutbus pause | resume`: stop and go on, for the whole fleet or one worker."""

import sys
from typing import Annotated

import typer

from rolloutbus.bus.wire.errors import BusError
from rolloutbus.bus.wire.messages.control import FleetStatus, PauseMode
from rolloutbus.cli.options import Address, AsJson, Deadline, YourKey, example, not_empty
from rolloutbus.cli.terminal import ExitStatus, ask, print_json
from rolloutbus.cli.verbs import Verbs
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import FleetResult

Worker = Annotated[
    str,
    typer.Option(
        "--worker", metavar="NAME", callback=not_empty, help="Only this one. Default: all."
    ),
]

app = Verbs()


@app.command(epilog=example("rolloutbus pause --mode drain --worker w0"))
def pause(
    address: Address = "",
    key: YourKey = "",
    mode: Annotated[
        PauseMode,
        typer.Option(
            help="What becomes of running requests: `in_place` keeps their KV cache, `retract` "
            "computes it again, `drain` finishes them first, `abort` stops them."
        ),
    ] = "in_place",
    worker: Worker = "",
    deadline: Deadline = 30.0,
    as_json: AsJson = False,
) -> None:
    """Stop sampling; requests wait until `resume`."""
    target = worker or "fleet"
    result = ask(
        address,
        key,
        lambda client: client.pause(mode, target=target, deadline_s=deadline, check=False),
    )
    _tell(result, {}, as_json=as_json)


@app.command(epilog=example("rolloutbus resume"))
def resume(
    address: Address = "",
    key: YourKey = "",
    worker: Worker = "",
    deadline: Deadline = 30.0,
    as_json: AsJson = False,
) -> None:
    """Go on after a pause; says so if nothing was paused."""

    async def go_on(client: RolloutClient) -> tuple[FleetResult, bool]:
        was_paused = is_paused(await client.status(), worker)
        target = worker or "fleet"
        return await client.resume(target=target, deadline_s=deadline, check=False), was_paused

    result, was_paused = ask(address, key, go_on)
    _tell(result, {"was_paused": was_paused}, as_json=as_json)


def is_paused(found: FleetStatus, worker: str) -> bool:
    """Whether this worker is paused, or is to be; empty: whether any is."""
    if worker:
        is_wanted = bool(found.paused.get(worker, found.pause))
    else:
        is_wanted = bool(found.pause) or any(found.paused.values())
    rows = [each for each in found.workers if worker in ("", each.name)]
    return is_wanted or any(each.state == "paused" for each in rows)


def _tell(result: FleetResult, more: dict[str, bool], *, as_json: bool) -> None:
    """Print what each worker did; exit status 1 unless every one did it."""
    answers = {
        name: str(answer) if isinstance(answer, BusError) else "done"
        for name, answer in sorted(result.by_worker.items())
    }
    answers |= dict.fromkeys(sorted(result.silent), "no answer")
    if as_json:
        print_json({**more, "workers": answers})
    else:
        lines = [f"{name}: {answer}" for name, answer in answers.items()] or ["no workers"]
        if not more.get("was_paused", True):
            # That all are done, who had nothing to do, is no news.
            is_news = set(answers.values()) != {"done"}
            lines = [*(lines if is_news else []), "nothing was paused"]
        sys.stdout.write("\n".join(lines) + "\n")
    if result.errors or result.silent:
        raise typer.Exit(ExitStatus.FAILED)
