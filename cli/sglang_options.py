"""Command-line options of the SGLang engine: `--tp`, `--text`, and `--sglang.NAME VALUE`."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from rolloutbus.cli.options import parse_engine_options

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
        help="sglang: keep its tokenizer, for stop strings, grammars, `min_new_tokens` and images.",
    ),
]
MORE_HELP = """

`--engine sglang` takes any argument of SGLang's server as `--sglang.NAME VALUE`, such as
`--sglang.mem_fraction_static 0.8`; see `python -m sglang.launch_server --help`.
"""


def engine_options(
    context: typer.Context, engine: str, plain: list[str] | None, *, tp: int = 1, text: bool = False
) -> dict[str, Any]:
    """Everything that was said about the engine, as `FleetSettings` wants it.

    Args:
        context: of the command, with what no option of ours took.
        engine: its kind.
        plain: `NAME=VALUE`, see `parse_engine_options`.
        tp: `--tp`.
        text: `--text`.

    Raises:
        typer.BadParameter: an option that is not of this engine, or of nobody.
    """
    options = parse_engine_options(plain)
    arguments: dict[str, object] = dict(_arguments(context.args))
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


def _arguments(words: Sequence[str]) -> Iterator[tuple[str, object]]:
    """(name, value as text) of each; a name without a value is switched on."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix(PREFIX).partition("=")
        if not word.startswith(PREFIX) or not name:
            raise typer.BadParameter(f"there is no {word!r} here; see --help")
        name = name.replace("-", "_")
        if equals:
            yield name, value
        elif rest and not rest[0].startswith("--"):
            yield name, rest.pop(0)
        else:
            yield name, True
