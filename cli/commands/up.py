"""`rolloutbus up`: a whole fleet in the foreground, until Ctrl-C."""

import asyncio
import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from rolloutbus.bus.actor.supervisor import ProcessEvent
from rolloutbus.bus.wire.errors import BusError
from rolloutbus.bus.wire.messages.control import FleetStatus
from rolloutbus.cli.options import (
    ANY_MORE,
    MORE_HELP,
    DeadLetters,
    EngineOptions,
    KeepCommitted,
    KeepText,
    KeysDir,
    Launcher,
    OwnAddress,
    ProfileDir,
    Quiet,
    RayOptions,
    RouterJournal,
    RunDir,
    SaveTargets,
    SessionsPerSlot,
    StartTimeout,
    TensorParallel,
    WeightsDir,
    WithTap,
    engine_options,
    example,
    not_empty,
    parse_save_targets,
    ray_launcher,
)
from rolloutbus.cli.progress import CLEAR, in_words, is_shown, waiting
from rolloutbus.cli.terminal import (
    ExitStatus,
    by_name,
    checked,
    connected,
    counted,
    print_json,
    run,
)
from rolloutbus.cli.verbs import Verbs
from rolloutbus.engine_worker.settings import START_TIMEOUT_S
from rolloutbus.launcher.fleet import Fleet, up
from rolloutbus.launcher.settings import EngineKind, Transport, UpOptions
from rolloutbus.trainer_adapter.store.settings import KEEP_COMMITTED

STATUS_EVERY_S = 1.0

app = Verbs()


HELP = f"""Run a router, a weight store and workers here; restart what dies; end all on Ctrl-C.

Other commands (status, generate, pause, …) find the only fleet by themselves; with several, say
`--name`. `rolloutbus ls` lists them.{MORE_HELP}"""


@app.command(
    "up",
    help=HELP,
    epilog=example("rolloutbus up --name exp-1 -n 2 --model ./model"),
    context_settings=ANY_MORE,
)
def up_command(
    context: typer.Context,
    *,
    name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            callback=not_empty,
            help="Unique among your fleets here. Default: `default`, or `default-2` and so on.",
        ),
    ] = "",
    model: Annotated[str, typer.Option(metavar="PATH", help="A local model directory.")] = "",
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, help="How many.")] = 2,
    engine: Annotated[EngineKind, typer.Option(help="`fake` needs no model.")] = "transformers",
    engine_option: EngineOptions = None,
    engine_python: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Interpreter of workers and engines, or its environment's directory, such as "
            "./.venv-sglang. Default: this one.",
        ),
    ] = "",
    tp: TensorParallel = 1,
    text: KeepText = False,
    policy: Annotated[str, typer.Option(help="Whose weights are served.")] = "default",
    store: Annotated[bool, typer.Option(help="Run a weight store, for updates.")] = True,
    weights_dir: WeightsDir = "",
    keep_committed: KeepCommitted = KEEP_COMMITTED,
    save_target: SaveTargets = None,
    profile_dir: ProfileDir = "",
    transport: Annotated[Transport, typer.Option(help="How the processes talk.")] = "ipc",
    address: OwnAddress = "",
    backend: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT",
            help="Where workers connect, those of other hosts too. Default: a fresh one; if "
            "--address is beyond this machine, the port after its own.",
        ),
    ] = "",
    run_dir: RunDir = "",
    keep_logs: Annotated[bool, typer.Option("--keep-logs", help="Leave the logs behind.")] = False,
    secure: KeysDir = "",
    dead_letters: DeadLetters = "",
    sessions_per_slot: SessionsPerSlot = 2.0,
    start_timeout: StartTimeout = START_TIMEOUT_S,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="Run a second router, which takes over when the first one does not come back.",
        ),
    ] = False,
    tap: WithTap = False,
    journal: RouterJournal = "",
    record: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Record everything from the start, as `record` does; see `play` and `export`.",
        ),
    ] = "",
    launcher: Launcher = "local",
    ray_option: RayOptions = None,
    http: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="Serve OpenAI's and SGLang's endpoints at this port of 127.0.0.1; 0: a free one.",
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one line of JSON when it is ready, and nothing else."),
    ] = False,
) -> None:
    """See HELP."""
    options = UpOptions(
        name=name,
        model=model,
        workers=workers,
        engine=engine,
        engine_options=engine_options(context, engine, engine_option, tp=tp, text=text),
        python=engine_python,
        policy=policy,
        store=store,
        weights_dir=weights_dir,
        keep_committed=keep_committed,
        save_targets=parse_save_targets(save_target),
        profile_dir=profile_dir,
        transport=transport,
        address=address,
        backend=backend,
        run_dir=run_dir or None,
        keep_logs=keep_logs,
        secure=secure or None,
        dead_letters=dead_letters,
        sessions_per_slot=sessions_per_slot,
        start_timeout_s=start_timeout,
        standby=standby,
        tap=tap,
        journal=journal,
        record=record,
        http=http,
        launcher=checked(lambda: ray_launcher(launcher, ray_option)),
    )
    fleet = checked(lambda: up(partial(_tell, quiet=quiet or as_json), **options))
    run(_stay_up(fleet, quiet=quiet, as_json=as_json), terminated=ExitStatus.OK)


def _tell(event: ProcessEvent, *, quiet: bool) -> None:
    """Say what happened to a process; if quiet, only what went wrong."""
    if event.kind == "started" or (quiet and event.kind == "ready"):
        return
    if is_shown(quiet=quiet):
        sys.stderr.write(CLEAR)  # of the line about what is waited for
    is_warning = event.kind == "told"
    out = sys.stderr if is_warning or quiet else sys.stdout
    out.write(f"{event.name}{':' if is_warning else ''} {event.what}\n")
    out.flush()


async def _stay_up(fleet: Fleet, *, quiet: bool, as_json: bool) -> None:
    async with AsyncExitStack() as stack:
        async with waiting(lambda: in_words(fleet.waits_for), quiet=quiet or as_json):
            await stack.enter_async_context(fleet)
        facts = {
            "name": fleet.name,
            "address": fleet.address,
            "http": fleet.http,
            "logs": str(fleet.run_dir / "logs"),
        }
        if as_json:
            print_json({**facts, "key_file": fleet.key_file, "pids": fleet.pids})
        else:
            lines = [f"{name}: {value}" for name, value in facts.items() if value]
            sys.stdout.write("\n".join([*lines, "Stop with Ctrl-C.", ""]))
            sys.stdout.flush()  # what waits for these lines may read them through a pipe
        if sys.stdout.isatty() and not quiet and not as_json:
            await _show_state(fleet)
        await asyncio.Event().wait()


async def _show_state(fleet: Fleet) -> None:
    """One line, for ever."""
    console = Console()
    line = Text("")
    async with connected(fleet.address, fleet.key_file) as client:
        with Live(line, console=console, auto_refresh=False, transient=True) as live:
            while True:
                try:
                    line = state_line(await client.status(deadline_s=STATUS_EVERY_S))
                except BusError:
                    line = Text("the router does not answer", "yellow")
                live.update(line, refresh=True)
                await asyncio.sleep(STATUS_EVERY_S)


def state_line(status: FleetStatus) -> Text:
    """`w0 ready v3 2/32 | w1 … | 4 running, 0 queued`."""
    workers = [
        f"{each.name} {each.state} v{each.version} {each.n_running}/{each.slots}"
        for each in sorted(status.workers, key=by_name)
    ]
    clients = counted(status.n_clients, "client")
    totals = f"{status.n_running} running, {status.n_queued} queued, {clients}"
    return Text(" | ".join([*workers, totals]), overflow="ellipsis", no_wrap=True)
