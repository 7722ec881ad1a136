"""All commands under one name, each imported when it is asked for."""

import importlib
from typing import Annotated, Any

import typer
from typer.core import (
    CompletionItem,  # pyright: ignore[reportPrivateImportUsage] - the type that `shell_complete` returns
    TyperGroup,
)
from typer.main import get_group

from rolloutbus.bus.wire.near_names import nearest
from rolloutbus.cli.interrupts import leaving_at_once
from rolloutbus.cli.verbs import VerbGroup, Verbs
from rolloutbus.launcher.version import DISTRIBUTION, installed_version

HELP = """A message bus between RL trainers and inference engines.

Begin with `rolloutbus up`; `rolloutbus COMMAND --help` explains a command.

Exit status of every command:

\b
  0    done
  1    failed: it was understood, and could not be done
  2    usage: an argument or a setting is wrong
  3    no router answers, or no such fleet runs here
  130  ended by Ctrl-C
  143  ended by SIGTERM
"""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{DISTRIBUTION} {installed_version()}")
        raise typer.Exit


MODULES = {
    "up": "up",
    "ls": "status",
    "status": "status",
    "generate": "generate",
    "gateway": "gateway",
    "metrics": "gateway",
    "pause": "control",
    "resume": "control",
    "scale": "scale",
    "restart": "scale",
    "drain": "scale",
    "weights": "weights",
    "router": "actors",
    "store": "actors",
    "worker": "actors",
    "keys": "keys",
    "record": "journals.record",
    "play": "journals.play",
    "replay": "journals.replay",
    "export": "journals.export",
    "inspect": "journals.inspect",
    "doctor": "doctor",
    "tail": "tail",
    "forward": "forward",
    "timeline": "journals.timeline",
    "top": "top",
    "demo": "demo",
    "completion": "completion",
}
"""Command -> its module in `commands/`. All but `--help` import only the one that is asked for."""


class CommandGroup(VerbGroup):
    """All of MODULES."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401 - click's, as typer has it
        """Their names, in the order of the help."""
        del ctx
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401 - as above
        """The command of this name; None: there is none."""
        module = MODULES.get(cmd_name)
        if module is None:
            if near := nearest(cmd_name, MODULES):
                ctx.fail(f"No such command {cmd_name!r}. Did you mean {near!r}?")
            return None
        with leaving_at_once():
            app = importlib.import_module(f"rolloutbus.cli.commands.{module}").app
        return get_group(app).get_command(ctx, cmd_name)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:  # noqa: ANN401 - as above
        """Their names, without the sentences, for which every module would be imported."""
        names = [name for name in MODULES if name.startswith(incomplete)]
        return [
            *map(CompletionItem, names),
            *super(TyperGroup, self).shell_complete(ctx, incomplete),
        ]


app = Verbs(
    name=DISTRIBUTION,
    cls=CommandGroup,
    help=HELP,
    epilog="Example: rolloutbus up -n 2 --engine fake",
    no_args_is_help=True,
    add_completion=False,
    # Errors of ours are one line; a traceback is a bug, and is shown as Python shows it.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _top(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """See HELP."""
