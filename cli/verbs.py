"""Commands with a plain help: readable at 80 columns, and each option names its value."""

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from rolloutbus.bus.wire.near_names import nearest

METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
"""What the help calls a value whose option does not say it."""
ANY_LENGTH = 1_000
NAMES_WIDTH = 26
"""Columns of the help for names; the text beside them has the rest of the 80."""


_NO_CHOICE = re.compile(r"'(.*?)' is not one of (.*)", re.DOTALL)


class Verb(TyperCommand):
    """One command."""

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - typer's
        options["rich_markup_mode"] = None
        super().__init__(*args, **options)
        _name_values(self)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - click's
        """Read the arguments; of a misspelt choice it is said which one may have been meant."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # pydantic's own words
            found = _NO_CHOICE.match(error.message)
            near = nearest(found[1], re.findall("'(.+?)'", found[2])) if found else ""
            if near:
                error.message += f" Did you mean {near!r}?"
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - click's
        """Write the lists of arguments and options."""
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            rows = [
                # Typer puts the type of an argument behind its name.
                (record[0].partition(" <")[0], record[1])
                for each in self.get_params(ctx)
                if each.param_type_name == kind and (record := each.get_help_record(ctx))
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=NAMES_WIDTH)


class VerbGroup(TyperGroup):
    """Several commands under one name."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - typer's
        options["rich_markup_mode"] = None
        super().__init__(**options)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - click's
        """Write the list of commands, each with the first sentence of its help, uncut."""
        names = self.list_commands(ctx)
        found = [(name, command) for name in names if (command := self.get_command(ctx, name))]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.get_short_help_str(ANY_LENGTH)) for name, each in found]
            )


class Verbs(typer.Typer):
    """A module's commands; all that typer's own class can do."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - typer's
        options.setdefault("cls", VerbGroup)
        options["rich_markup_mode"] = None
        super().__init__(**options)

    def command(self, name: str | None = None, **options: Any) -> Callable[..., Any]:  # noqa: ANN401
        """Decorates the function of one command."""
        options.setdefault("cls", Verb)
        return super().command(name, **options)


def _name_values(command: TyperCommand) -> None:
    """Name the value of each option and argument of a command, unless it has a name."""
    hints = get_type_hints(command.callback) if command.callback is not None else {}
    for each in command.params:
        if each.metavar is None:
            is_option = each.param_type_name == "option"
            name = each.name or ""
            each.metavar = _metavar(hints.get(name)) if is_option else name.upper()


def _metavar(kind: Any) -> str | None:  # noqa: ANN401 - any annotation
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        [kind] = [each for each in get_args(kind) if each is not type(None)]
    if get_origin(kind) is list:
        [kind] = get_args(kind)
    return METAVARS.get(kind)
