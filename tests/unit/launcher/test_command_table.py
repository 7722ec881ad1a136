"""The whole table of commands: one word for one option, and a help that 80 columns can hold."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.main import get_group
from typer.testing import CliRunner

from rolloutbus.cli.app import app
from rolloutbus.cli.options import Address
from rolloutbus.cli.terminal import ExitStatus

WIDTH = 80
PAGE = Path(__file__).parents[3] / "docs" / "command_line.md"
PRINTS_NO_OTHER = {
    "completion": "a script for the shell",
    "inspect": "JSON in any case",
    "keys rotate": "JSON in any case",
    "keys allow": "nothing",
    "keys revoke": "nothing",
}
"""Commands without --json, and what they print."""


def commands(group: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - typer's
    """Yields (words that call it, the command) for each, groups too."""
    group = group or get_group(app)
    for name in group.list_commands(None):
        command, words = group.get_command(None, name), f"{path} {name}".strip()
        yield words, command
        if hasattr(command, "list_commands"):
            yield from commands(command, words)


TABLE = dict(commands())
LEAVES = {words: each for words, each in TABLE.items() if not hasattr(each, "list_commands")}


def options_of(command: Any) -> list[Any]:  # noqa: ANN401 - as above
    return [each for each in command.params if each.param_type_name == "option"]


def names_of(command: Any) -> set[str]:  # noqa: ANN401 - as above
    return {name for each in options_of(command) for name in each.opts}


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    return CliRunner()


def test_every_command_that_prints_can_print_json() -> None:
    without = {words for words, each in LEAVES.items() if "--json" not in names_of(each)}
    assert without == set(PRINTS_NO_OTHER) & set(LEAVES)


def test_whoever_asks_a_fleet_finds_it_by_the_same_option() -> None:
    told: str = get_args(Address)[1].help
    asking = {words for words, each in LEAVES.items() if "--address" in names_of(each)} - {
        "up",
        "doctor",
    }
    assert {"status", "generate", "record", "replay", "tail", "weights check"} <= asking
    of_this_machine = {"scale", "restart"}  # only a launcher here carries them out
    assert of_this_machine <= asking
    for words in asking:
        [option] = [each for each in options_of(LEAVES[words]) if "--address" in each.opts]
        assert option.opts == ["--address", "-a", "--name"], words
        assert option.help == told or words in of_this_machine, words


def test_a_letter_means_one_word_and_a_word_has_one_letter() -> None:
    words_of, letters_of = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for each in LEAVES.values():
        for option in options_of(each):
            letters = {name for name in option.opts if not name.startswith("--")}
            [word, *_] = [name for name in option.opts if name.startswith("--")]
            letters_of[word].add(" ".join(letters))
            for letter in letters:
                words_of[letter].add(word)
    assert {letter: found for letter, found in words_of.items() if len(found) > 1} == {}
    assert {word: found for word, found in letters_of.items() if len(found) > 1} == {}


def test_files_that_are_written_are_named_by_output() -> None:
    others = {"--out", "--outfile", "--output-file", "--out-dir", "--output-dir"}
    assert [words for words, each in LEAVES.items() if names_of(each) & others] == []
    assert {words for words, each in LEAVES.items() if "--output" in names_of(each)} == {
        *("export", "timeline", "demo", "weights get", "keys new", "keys join"),
    }


@pytest.mark.parametrize("words", ["", *TABLE])
def test_help_is_readable_at_80_columns(cli: CliRunner, words: str) -> None:
    told = cli.invoke(app, [*words.split(), "--help"], prog_name="rolloutbus").stdout
    lines = told.splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []
    assert [
        line for line in lines if line.endswith(("...", "…")) and "Usage" not in line
    ] == []  # cut off
    assert [line for line in lines if re.search(r"\w-$", line)] == []  # a word torn apart
    assert not re.search(r"<\w+>", told)  # a type of Python
    if words in LEAVES:
        assert re.search(rf"Example: .*rolloutbus {words}\b", told)


def test_every_option_is_explained() -> None:
    silent = [
        f"{words} {option.opts[0]}"
        for words, each in LEAVES.items()
        for option in each.params
        if not option.help
    ]
    assert silent == []


def test_exit_statuses_are_told_by_the_help_and_the_page(cli: CliRunner) -> None:
    told = cli.invoke(app, ["--help"]).stdout
    page = PAGE.read_text()
    for status in ExitStatus:
        [line] = re.findall(rf"^ +{status.value} +(.*)$", told, re.MULTILINE)
        assert re.search(rf"^\| {status.value} \|", page, re.MULTILINE), line
