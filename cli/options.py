"""Command-line options that several commands share."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import typer

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.near_names import nearest
from rolloutbus.launcher.on_ray.launcher import RayLauncher

PREFIX = "--sglang."
ANY_MORE: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a command that takes `--sglang.NAME VALUE`."""

TensorParallel = Annotated[
    int,
    typer.Option("--tp", min=1, help="sglang: GPUs that share the model's tensors."),
]
KeepText = Annotated[
    bool,
    typer.Option(
        "--text",
        help="sglang: keep its tokenizer, for grammars, images and `rerank`.",
    ),
]
MORE_HELP = """

`--engine sglang` takes any argument of SGLang's server as `--sglang.NAME VALUE`, such as
`--sglang.mem_fraction_static 0.8`; see `python -m sglang.launch_server --help`.
"""


def engine_options(
    context: typer.Context, engine: str, plain: list[str] | None, *, tp: int = 1, text: bool = False
) -> dict[str, Any]:
    """Returns all engine options of the command line, in the form of `FleetSettings`.

    Raises:
        typer.BadParameter: an option that this engine, or any, does not have.
    """
    options = parse_engine_options(plain)
    arguments: dict[str, object] = dict(_arguments(context))
    if tp > 1:
        arguments["tp_size"] = tp
    if engine != "sglang" and (arguments or text):
        raise typer.BadParameter(f"{PREFIX}NAME, --tp and --text are of --engine sglang")
    if arguments:
        plain_arguments = options.get("arguments", {})
        if not isinstance(plain_arguments, dict):
            raise typer.BadParameter('arguments: not an object, such as {"tp_size": 2}')
        options["arguments"] = {**plain_arguments, **arguments}
    if text:
        options["text"] = True
    return options


def _arguments(context: typer.Context) -> Iterator[tuple[str, object]]:
    """(name, value as text) of each; a name without a value is switched on."""
    rest = list(context.args)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix(PREFIX).partition("=")
        if not word.startswith(PREFIX) or not name:
            raise typer.BadParameter(_unknown(context, word.partition("=")[0]))
        name = name.replace("-", "_")
        if equals:
            yield name, value
        elif rest and not rest[0].startswith("--"):
            yield name, rest.pop(0)
        else:
            yield name, True


def _unknown(context: typer.Context, word: str) -> str:
    """Says that a command has no such option, and what may have been meant."""
    if word == "-o":
        return "-o is no option here: those of the engine are -e NAME=VALUE (--engine-option)"
    known = [name for each in context.command.params for name in each.opts]
    near = nearest(word, known)
    return f"there is no {word!r} here; " + (f"did you mean {near}?" if near else "see --help")


def not_empty(context: typer.Context, option: typer.CallbackParam, value: str) -> str:
    """Checks an option's value: the option may be absent, but its value must not be empty.

    Raises:
        typer.BadParameter: it was given, and is empty: a shell variable that is not set?
    """
    source = context.get_parameter_source(option.name or "")
    if not value and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("it is empty; give a value, or leave the option out")
    return value


Address = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        "--name",
        metavar="NAME|ENDPOINT",
        callback=not_empty,
        help="Which fleet: its name (see `rolloutbus ls`), or where its router listens for "
        "clients, e.g. tcp://127.0.0.1:7777; with a standby both, separated by a comma. Default: "
        "the only fleet that runs here.",
    ),
]
OwnAddress = Annotated[
    str,
    typer.Option(
        "--address", "-a", metavar="ENDPOINT", help="Where clients connect. Default: a fresh one."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress; without a terminal there is none.")
]
OnlyJson = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        "--json",
        help="No progress, which only a terminal gets; the line of JSON comes in any case.",
    ),
]
"""Of the services, which print one line of JSON when they are ready."""
YourKey = Annotated[
    str,
    typer.Option(
        "--key",
        "-k",
        metavar="FILE",
        help="Your key, for a guarded router: one with an endpoint like tcp://HOST:PORT#KEY.",
    ),
]
KeyFile = Annotated[
    str,
    typer.Option("--key", "-k", metavar="FILE", help="This actor's key pair; see `keys new`."),
]
AllowFile = Annotated[
    str,
    typer.Option(
        "--allow-list",
        "-l",
        metavar="FILE",
        help="Who may connect; see `keys allow`. A worker or store needs none: the router hands it "
        "its own.",
    ),
]
Deadline = Annotated[
    float, typer.Option("--deadline", metavar="SECONDS", min=0.001, help="From now on.")
]
DeadLetters = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="Keeps requests that killed engines, for its owner only. "
        "Default: `up`: dead_letters.msgpack beside the logs; `router`: none.",
    ),
]
SessionsPerSlot = Annotated[
    float,
    typer.Option(help="Sessions that may be open at a worker for each of its slots."),
]
KeysDir = Annotated[
    str,
    typer.Option(
        metavar="DIR", help="Keys for every link, over TCP; the directory is made if missing."
    ),
]
WeightsRoot = Annotated[
    str, typer.Option(metavar="DIR", help="Where the files of `store --disk` can be read here.")
]
WeightsDir = Annotated[
    str,
    typer.Option(
        metavar="DIR",
        help="Write every version to files here; the next fleet begins with the last one.",
    ),
]
KeepCommitted = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        help="Committed versions of each policy whose bytes the store keeps in /dev/shm.",
    ),
]
SaveTargets = Annotated[
    list[str] | None,
    typer.Option(
        "--save-target",
        metavar="NAME=PLACE",
        help="Let save_weights write to this directory, or address that the engine knows, by that "
        "name; may be repeated.",
    ),
]
ProfileDir = Annotated[
    str, typer.Option(metavar="DIR", help="Let start_profile write into this directory.")
]
StartTimeout = Annotated[
    float,
    typer.Option(
        "--start-timeout",
        metavar="SECONDS",
        min=1.0,
        help="How long an engine may take to be built: large models, slow disks.",
    ),
]
RunDir = Annotated[
    str, typer.Option(metavar="DIR", help="For sockets and logs. Default: a temporary one.")
]
WithTap = Annotated[
    bool, typer.Option("--tap", help="Let `record` hear all that the router hears and says.")
]
RouterJournal = Annotated[
    str,
    typer.Option(
        "--journal",
        metavar="DIR",
        help="Write down every turn of the router, so that `replay --core` can repeat it.",
    ),
]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-option",
        "-e",
        metavar="NAME=VALUE",
        help="An option of the engine, e.g. -e slots=64; may be repeated.",
    ),
]
Launcher = Annotated[
    Literal["local", "ray"],
    typer.Option(
        metavar="local|ray",
        help="`local`: processes of this one; `ray`: actors on the nodes of a cluster.",
    ),
]
RayOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--ray-option",
        metavar="NAME=VALUE",
        help="An option of `RayLauncher`, e.g. gpus_per_worker=2, with --launcher ray; may be "
        "repeated.",
    ),
]


MAX_SPEED = "max"
Speed = Annotated[str, typer.Option(metavar="1|10|max", help="How many times as fast as it was.")]


def speed_of(text: str) -> float:
    """The number that `--speed` means; `max`: infinite.

    Raises:
        SettingsError: it is none above 0.
    """
    try:
        speed = math.inf if text == MAX_SPEED else float(text)
    except ValueError:
        speed = math.nan
    if not speed > 0:
        raise SettingsError(f"speed: {text!r} is neither a number above 0 nor {MAX_SPEED!r}")
    return speed


def example(text: str) -> str:
    """The end of a command's help."""
    return f"Example: {text}"


_JSON_OF = {"True": "true", "False": "false", "None": "null"}
"""Python's word -> JSON's."""


def parse_engine_options(
    options: list[str] | None, param_hint: str = "--engine-option"
) -> dict[str, Any]:
    """`["slots=64", "device=cpu"]` -> `{"slots": 64, "device": "cpu"}`.

    Raises:
        typer.BadParameter: one has no `=`, or a value as Python writes it.
    """
    parsed: dict[str, Any] = {}
    for option in options or []:
        name, equals, value = option.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{option!r} is not NAME=VALUE", param_hint=param_hint)
        if value in _JSON_OF:
            message = f"{name}: values are JSON: write {name}={_JSON_OF[value]}"
            raise typer.BadParameter(message, param_hint=param_hint)
        parsed[name] = _value(value)
    return parsed


def ray_launcher(launcher: str, options: list[str] | None) -> RayLauncher | None:
    """The launcher that the command line asks for; None: processes of this one.

    Raises:
        typer.BadParameter: an option that it does not have, or has without Ray.
        SettingsError: one has no valid value.
    """
    given = parse_engine_options(options, "--ray-option")
    if launcher != "ray":
        if given:
            raise typer.BadParameter("it is of --launcher ray", param_hint="--ray-option")
        return None
    # A placement group is an object of a program's.
    known = [each for each in RayLauncher.__struct_fields__ if each not in _OF_PROGRAMS]
    for name in given.keys() - set(known):
        meant = nearest(name, known)
        hint = f"did you mean {meant}? " if meant else ""
        raise typer.BadParameter(
            f"there is no {name[:64]!r}; {hint}there are {', '.join(known)}",
            param_hint="--ray-option",
        )
    return RayLauncher(**given)


_OF_PROGRAMS = ("placement_group", "bundles")


def parse_save_targets(options: list[str] | None) -> dict[str, str]:
    """`["hub=/data/models"]` -> `{"hub": "/data/models"}`.

    Raises:
        typer.BadParameter: one has no `=`.
    """
    parsed: dict[str, str] = {}
    for option in options or []:
        name, _, place = option.partition("=")
        if not name or not place:
            raise typer.BadParameter(f"{option!r} is not NAME=PLACE", param_hint="--save-target")
        parsed[name] = place
    return parsed


def _value(text: str) -> Any:  # noqa: ANN401 - the engine's settings say which type it must have
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
