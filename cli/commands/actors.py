"""`rolloutbus router | store | worker`: one actor in the foreground, to build a fleet by hand."""

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from rolloutbus.bus.actor.variables import PROGRESS
from rolloutbus.bus.security.key_files import router_addresses_beside, router_key_beside
from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.cli.options import (
    ANY_MORE,
    MORE_HELP,
    AllowFile,
    DeadLetters,
    EngineOptions,
    KeepCommitted,
    KeepText,
    KeyFile,
    OnlyJson,
    ProfileDir,
    RouterJournal,
    SaveTargets,
    SessionsPerSlot,
    TensorParallel,
    WeightsRoot,
    example,
    not_empty,
    parse_save_targets,
)
from rolloutbus.cli.options import engine_options as told_options
from rolloutbus.cli.progress import is_shown
from rolloutbus.cli.terminal import checked
from rolloutbus.cli.verbs import Verbs
from rolloutbus.engine_worker.settings import START_TIMEOUT_S, HostSettings, WorkerSettings
from rolloutbus.launcher.journaled_router import JournaledRouterSettings
from rolloutbus.launcher.plan import environment
from rolloutbus.launcher.settings import EngineKind, FleetSettings, absolute_targets, engine_options
from rolloutbus.router.settings import TAKEOVER_S, PairSettings, RouterSettings
from rolloutbus.trainer_adapter.store.settings import KEEP_COMMITTED, StoreSettings

BACKEND = "tcp://127.0.0.1:7778"
DRAIN_S = 15.0
"""With the seconds that a worker takes to leave after it, within the 30 s that Kubernetes and Slurm
give a process by default between SIGTERM and SIGKILL."""
RUN = """\
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.argv.pop(0)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Runs a module as `python -m` does; Ctrl-C while it is imported ends it without a traceback."""

Router = Annotated[
    str,
    typer.Option(
        "--router",
        "-r",
        metavar="ENDPOINT",
        callback=not_empty,
        help="The router's backend; with a standby both, separated by a comma. Default: that of "
        f"router.json beside --key, which `keys join` and a router leave there; or else {BACKEND}.",
    ),
]
RelayEndpoint = Annotated[
    str,
    typer.Option(
        "--relay",
        metavar="ENDPOINT",
        help="Where other workers pull weights from this one. Default: beside --stream if that "
        "is beyond this machine, otherwise nowhere.",
    ),
]

Advertise = Annotated[
    str,
    typer.Option(
        metavar="HOST",
        callback=not_empty,
        help="Name or address that others are told to connect to, with the ports that are listened "
        "on: for networks that translate addresses. Default: the address that is listened on.",
    ),
]

app = Verbs()


@app.command(epilog=example("rolloutbus router --frontend tcp://127.0.0.1:7777"))
def router(
    *,
    frontend: Annotated[
        str, typer.Option(metavar="ENDPOINT", help="Where it listens for clients.")
    ] = "tcp://127.0.0.1:7777",
    backend: Annotated[
        str, typer.Option(metavar="ENDPOINT", help="Where it listens for workers and the store.")
    ] = BACKEND,
    queue_limit: Annotated[
        int, typer.Option(help="Requests that may wait; more are refused.")
    ] = 10_000,
    sessions_per_slot: SessionsPerSlot = 2.0,
    dead_letters: DeadLetters = "",
    tap: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT",
            help="Where everything that is routed is published, for `record`. Default: nowhere.",
        ),
    ] = "",
    standby: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT",
            callback=not_empty,
            help="Another router stands by for this one: where it listens for clients.",
        ),
    ] = "",
    standby_of: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT",
            callback=not_empty,
            help="Stand by for the router that listens for clients there, which is told this "
            "one's --frontend with --standby.",
        ),
    ] = "",
    takeover: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="With --standby or --standby-of: silence of the active router after which the "
            f"other one takes over. Default: {TAKEOVER_S:g}.",
        ),
    ] = None,
    journal: RouterJournal = "",
    key: KeyFile = "",
    allow_list: AllowFile = "",
    quiet: OnlyJson = False,
) -> None:
    """Run a router. Prints one JSON line with its endpoints when it is ready."""
    settings = checked(
        lambda: RouterSettings(
            frontend=frontend,
            backend=backend,
            queue_limit=queue_limit,
            sessions_per_slot=sessions_per_slot,
            security=_security(key, allow_list),
            dead_letters=_absolute(dead_letters),
            tap=tap,
            pair=_pair(standby, standby_of, takeover),
        )
    )
    if journal:
        kept = JournaledRouterSettings(settings, str(Path(journal).absolute()))
        _become("rolloutbus.launcher.journaled_router", kept, quiet=quiet)
    _become("rolloutbus.router", settings, quiet=quiet)


@app.command(epilog=example("rolloutbus store --directory ./versions"))
def store(
    *,
    directory: Annotated[
        Path, typer.Option(help="Holds the durable record of versions; one store at a time.")
    ],
    router: Router = "",
    bulk: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT",
            help="Where weights are pulled from. Default: a free port of the interface that faces "
            "the router.",
        ),
    ] = "",
    advertise: Advertise = "",
    disk: Annotated[
        str,
        typer.Option(metavar="DIR", help="Also write every version to files below this directory."),
    ] = "",
    keep_committed: KeepCommitted = KEEP_COMMITTED,
    key: KeyFile = "",
    allow_list: AllowFile = "",
    quiet: OnlyJson = False,
) -> None:
    """Run a weight store. Prints one JSON line with its endpoint when it is ready."""
    settings = checked(
        lambda: StoreSettings(
            router=_router(router, key),
            directory=str(directory.absolute()),
            bulk=bulk,
            advertise=advertise,
            keep_committed=keep_committed,
            disk=_absolute(disk),
            security=_security(key, allow_list),
        )
    )
    _become("rolloutbus.trainer_adapter.store", settings, quiet=quiet)


@app.command(
    help=f"Run a worker with its engine. Prints one JSON line when it has joined.{MORE_HELP}",
    epilog=example("rolloutbus worker --name w7 --engine sglang --model ./model --tp 2"),
    context_settings=ANY_MORE,
)
def worker(
    context: typer.Context,
    *,
    name: Annotated[str, typer.Option(help="Unique in the fleet; kept over restarts.")],
    model: Annotated[str, typer.Option(metavar="PATH", help="A local model directory.")] = "",
    router: Router = "",
    engine: Annotated[EngineKind, typer.Option(help="The engine that samples.")] = "transformers",
    engine_option: EngineOptions = None,
    tp: TensorParallel = 1,
    text: KeepText = False,
    policy: Annotated[str, typer.Option(help="Whose weights it serves.")] = "default",
    stream: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT",
            help="Where tokens are published. Default: a free port of the interface that faces "
            "the router.",
        ),
    ] = "",
    relay: RelayEndpoint = "",
    advertise: Advertise = "",
    weights_root: WeightsRoot = "",
    save_target: SaveTargets = None,
    profile_dir: ProfileDir = "",
    drain: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="What runs gets so long to end after SIGTERM; 0: none. A second SIGTERM, or "
            "Ctrl-C, does not wait.",
        ),
    ] = DRAIN_S,
    start_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=1.0,
            help="How long the engine may take to be built, and then routers may refuse the key "
            "of a worker that has never joined.",
        ),
    ] = START_TIMEOUT_S,
    key: KeyFile = "",
    allow_list: AllowFile = "",
    quiet: OnlyJson = False,
) -> None:
    """See `help`."""
    save_targets = parse_save_targets(save_target)
    own_options = told_options(context, engine, engine_option, tp=tp, text=text)

    def settings() -> WorkerSettings:
        alone = FleetSettings(model=model, workers=1, engine=engine, engine_options=own_options)
        return WorkerSettings(
            name=name,
            router=_router(router, key),
            policy=policy,
            stream=stream,
            relay=relay,
            advertise=advertise,
            weights_root=_absolute(weights_root),
            save_targets=absolute_targets(save_targets),
            profile_dir=_absolute(profile_dir),
            drain_s=drain,
            engine=engine,
            engine_options=engine_options(alone),
            host=HostSettings(start_timeout_s=start_timeout),
            key_patience_s=start_timeout,
            security=_security(key, allow_list),
        )

    _become("rolloutbus.engine_worker", checked(settings), quiet=quiet)


def _pair(standby: str, standby_of: str, takeover_s: float | None) -> PairSettings | None:
    if standby and standby_of:
        raise SettingsError("--standby and --standby-of: of two routers, one is the other's")
    other = standby or standby_of
    if not other:
        if takeover_s is not None:
            raise SettingsError("--takeover needs --standby or --standby-of")
        return None
    silence_s = TAKEOVER_S if takeover_s is None else takeover_s
    return PairSettings(other, is_first=bool(standby), takeover_s=silence_s)


def _router(router: str, key: str) -> str:
    """The router's backend: as it was given, or as it is known beside the key."""
    if router or not key:
        return router or BACKEND
    known = router_addresses_beside(key)
    if known.lacks_a_backend:
        raise SettingsError(
            "the router has a standby, and router.json beside --key has the backend of one of "
            "them: say both, --router tcp://HOST:PORT,tcp://HOST:PORT"
        )
    return known.backend or BACKEND


def _security(key: str, allow_list: str) -> SecuritySettings | None:
    if not key and not allow_list:
        return None
    key_file = _absolute(key)
    server_key_file = router_key_beside(key_file) if key else ""
    return SecuritySettings(
        key_file=key_file, server_key_file=server_key_file, allow_list=_absolute(allow_list)
    )


def _absolute(path: str) -> str:
    return path and str(Path(path).absolute())


def _become(module: str, settings: msgspec.Struct, *, quiet: bool) -> None:
    """Turn this process into the actor: signals and exit status are its own from here on."""
    argv = [sys.executable, "-c", RUN, module]
    argv += ["--settings-json", msgspec.json.encode(settings).decode()]
    variables = environment()
    if is_shown(quiet=quiet):
        variables[PROGRESS] = "terminal"
    os.execve(sys.executable, argv, variables)  # noqa: S606 - no shell
