"""Writes docs/cli.md from the command line's own parser: `make docs`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from typer.main import get_group

from rolloutbus.cli.app import MODULES, app

PAGE = Path(__file__).with_name("cli.md")
HEAD = """# All commands

<!-- Made by `make docs` from the command line's own parser: edit its help. -->

```console
$ rolloutbus status
$ rolloutbus generate --prompt-ids 1,2,3 --max-new-tokens 8
```

Every command explains itself with `--help`. What they have in common, and their exit status:
[The command line](command_line.md).
"""


def page() -> str:
    """The page as it is to be."""
    group: Any = get_group(app)
    sections = [
        section
        for name in MODULES
        for section in _sections(f"rolloutbus {name}", group.get_command(None, name))
    ]
    return HEAD + "".join(sections)


def _sections(path: str, command: Any) -> Iterator[str]:  # noqa: ANN401 - typer's classes are not public
    """The section of a command, and those of its own commands."""
    children: dict[str, Any] = getattr(command, "commands", {})
    depth = "#" * len(path.split())
    title = path.removeprefix("rolloutbus ")
    parts = [f"\n{depth} {title}\n\n{_prose(command.help)}\n"]
    if not children:
        parts.append(f"\n```text\n{_usage(path, command)}\n```\n")
    if rows := [_row(each) for each in command.params if not each.hidden]:
        parts.append("\n| | value | default | |\n|---|---|---|---|\n" + "".join(rows))
    if command.epilog:
        parts.append(f"\nExample: `{command.epilog.removeprefix('Example: ')}`\n")
    yield "".join(parts)
    for name, child in children.items():
        yield from _sections(f"{path} {name}", child)


def _usage(path: str, command: Any) -> str:  # noqa: ANN401 - as above
    words = [path, "[OPTIONS]"]
    for each in command.params:
        if not each.opts[0].startswith("-"):
            name = each.metavar or each.name.upper()
            words.append(name if each.required else f"[{name}]")
    return " ".join(words)


def _row(option: Any) -> str:  # noqa: ANN401 - as above
    is_argument = not option.opts[0].startswith("-")
    names = [option.metavar or option.name.upper()] if is_argument else option.opts
    spelt = " ".join(f"`{each}`" for each in [*names, *option.secondary_opts])
    value = "" if is_argument or option.is_flag else _value(option)
    return f"| {spelt} | {value} | {_default(option)} | {_prose(option.help)} |\n"


def _value(option: Any) -> str:  # noqa: ANN401 - as above
    """What stands behind the option."""
    kind = option.type_descriptor.annotation
    plain = [each for each in get_args(kind) or (kind,) if each is not type(None)]
    if option.metavar:
        words = option.metavar.split("|")
    elif get_origin(kind) is Literal:
        words = [str(each) for each in plain]
    else:
        words = [plain[0].__name__.upper()]
    return " or ".join(f"`{each}`" for each in words)


def _default(option: Any) -> str:  # noqa: ANN401 - as above
    if option.required:
        return "required"
    value = option.default
    if value is None or value == "" or callable(value) or str(value) == ".":
        return ""
    if option.is_flag:
        names = option.opts if value else option.secondary_opts
        return f"`{names[0]}`" if names else ""
    return f"`{value}`"


def _prose(text: str | None) -> str:
    """In one line; an asterisk or a bar that is meant stays."""
    paragraphs = [" ".join(each.split()) for each in (text or "").split("\n\n")]
    return "\n\n".join(re.sub(r"(?<!\\)\|", r"\\|", each) for each in paragraphs).strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
