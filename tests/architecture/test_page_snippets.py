"""Blocks of code in the pages: what is not run says why, and commands have such options."""

import ast
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_group

from rolloutbus.cli.app import app
from tests.page_snippets import PYTHON, SHELL, Snippet, pages, snippets_of, words_of

AT_MOST = {
    "GPU": 7,
    "framework": 17,
    "hosts": 12,
    "hub": 1,
    "processes": 1,
    "ranks": 1,
    "recording": 2,
    "terminal": 3,
    "time": 9,
}
"""Why no test runs a block -> how many such blocks there are. Raise it only with a reason."""
SNIPPETS = [each for page in pages() for each in snippets_of(page)]


def test_each_block_says_its_language() -> None:
    assert [each.place for each in SNIPPETS if not each.language] == []


def test_blocks_that_are_not_run_say_why_and_are_few() -> None:
    reasons = Counter(each.not_run.partition(":")[0] for each in SNIPPETS if each.not_run)

    assert {reason: n for reason, n in reasons.items() if n > AT_MOST.get(reason, 0)} == {}
    assert [each.place for each in SNIPPETS if each.not_run and ": " not in each.not_run] == []


def test_each_block_is_what_it_says() -> None:
    """Python, YAML or JSON; also those that no test runs."""
    for each in SNIPPETS:
        if each.language in PYTHON and not each.code.startswith(" "):
            ast.parse(each.code, each.place)
        elif each.language == "yaml":
            yaml.safe_load(each.code)
        elif each.language == "json":
            json.loads(each.code)


def test_lines_of_curl_are_where_they_are_run() -> None:
    """Those of tests/integration/test_gateway_page.py; any other command stands behind a `$`."""
    others = [
        f"{each.place}: {command}"
        for each in SNIPPETS
        if each.language in ("sh", "bash")
        for command in each.commands
        if each.page != "docs/gateway.md" or not command.startswith("curl ")
    ]
    assert others == []


@pytest.mark.parametrize(
    "snippet", [each for each in SNIPPETS if each.language in SHELL], ids=lambda each: each.place
)
def test_commands_have_the_options_that_the_page_says(snippet: Snippet, tmp_path: Path) -> None:
    """Also of those blocks that no test runs."""
    for command in snippet.commands:
        words = words_of(command)
        if words[:1] == ["rolloutbus"]:
            (tmp_path / "there").touch()
            _check(words[1:])


def _check(words: list[str]) -> None:
    """Parse what is typed after `rolloutbus`; nothing is done."""
    command: Any = get_group(app)
    path = ["rolloutbus"]
    while children := getattr(command, "commands", None) or hasattr(command, "get_command"):
        del children
        name, *words = words
        command = command.get_command(None, name)
        assert command is not None, f"{' '.join(path)} has no {name!r}"
        path.append(name)
    options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {
        "--help",
        "-h",
    }
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("-") and not name.startswith("--sglang.") and not name[1:].isdigit():
            assert name in options, f"{' '.join(path)} has no {name}"
