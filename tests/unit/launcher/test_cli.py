import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_group
from typer.testing import CliRunner

from rolloutbus.bus.wire.messages.control import FleetStatus, WorkerStatus
from rolloutbus.cli.app import app
from rolloutbus.cli.commands.up import state_line
from rolloutbus.cli.options import parse_engine_options

COMMANDS = [
    "up", "ls", "status", "generate", "pause", "resume", "router", "store", "worker", "demo",
    "record", "replay", "export", "inspect", "timeline", "top", "tail", "forward",
]  # fmt: skip


UNKNOWABLE = "/" + "x" * 256
"""No such directory can be; to ask whether it is there is an error, as without permission."""


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


def test_the_demo_takes_as_long_as_the_readme_says(cli: CliRunner) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    (minutes,) = re.findall(r"make demo .* (\w+) minutes", readme)
    told = " ".join(cli.invoke(app, ["demo", "--help"]).stdout.split())
    assert f"{minutes} minutes" in told


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_an_option_names_no_option_that_the_command_lacks(command: str) -> None:
    group: Any = get_group(app)
    parameters = group.get_command(None, command).params
    options = {name for each in parameters for name in (*each.opts, *each.secondary_opts)}
    for each in parameters:
        told = re.sub("`[^`]*`", "", getattr(each, "help", None) or "")  # of other commands
        assert set(re.findall(r"(?<![\w-])--[a-z-]+", told)) <= options, told


@pytest.mark.parametrize(
    ("line", "status", "complaint"),
    [
        ("up --model /nowhere", 2, "error: model: /nowhere is not a directory\n"),
        ("up --engine fake -e slots", 2, "NAME=VALUE"),
        ("up --engine fake --ray-option strategy=PACK", 2, "it is of --launcher ray"),
        ("up --engine fake --launcher ray --ray-option strateg=PACK", 2, "did you mean strategy?"),
        ("up --engine fake --launcher ray --ray-option strategy=X", 2, "error: strategy: 'X'"),
        ("up --engine fake -e slotz=3", 2, "error: engine_options: "),
        ("up --engine fake -n 0", 2, "--workers"),
        (
            "router --frontend tcp://0.0.0.0:7777",
            2,
            "error: tcp://0.0.0.0:7777 is beyond this machine: set security.key_file and",
        ),
        ("worker --name", 2, "--name"),
        ("worker --name w@0 --engine fake", 2, "error: name: 'w@0' is no name"),
        ("generate", 2, "error: give a prompt: either text or --prompt-ids"),
        ("generate --prompt-ids 1,two", 2, "error: --prompt-ids: '1,two' is not like 1,2,3\n"),
        ("generate hello", 3, "error: no fleet of yours runs here"),
        (
            "generate a -a tcp://127.0.0.1:1",
            2,
            "its tokenizer is unknown: name one with --tokenizer",
        ),
        ("generate a --tokenizer /nowhere", 2, "error: tokenizer: cannot read /nowhere"),
        ("generate --prompt-ids 1 --stream --n 2", 2, "error: --stream shows one sample"),
        ("pause --mode gently", 2, ": 'gently' is not one of 'abort', 'in_place', 're"),
        ("up --engine fak", 2, "'--engine': 'fak' is not one of 'transformers', 'sglang', 'fake'."),
        ("up --engine fak", 2, "Did you mean 'fake'?"),
        ("worker --name w --engine fke", 2, "Did you mean 'fake'?"),
        ("keys allow x --role clint --name x", 2, "Did you mean 'client'?"),
        ("router --tap tcp://0.0.0.0:7777", 2, "error: tcp://0.0.0.0:7777 is beyond this machine"),
        ("record ./j --filter worker=w0", 2, "error: filter: 'worker=w0' is not client=, session="),
        ("record ./j -a nowhere", 3, "error: no fleet of yours named 'nowhere' runs here"),
        ("record ./j", 3, "error: no fleet of yours runs here"),
        ("tail", 3, "error: no fleet of yours runs here"),
        ("tail --tokenizer /nowhere", 2, "error: tokenizer: cannot read /nowhere"),
        ("tail -a tcp://127.0.0.1:1 --via tcp://192.0.2.1:5", 2, "error: tcp://192.0.2.1:5 is bey"),
        ("forward", 3, "error: no fleet of yours runs here"),
        ("forward -a ipc:///x --bind tcp://0.0.0.0:5", 2, "error: tcp://0.0.0.0:5 is beyond this"),
        ("export /nowhere -o rows.csv", 1, "error: /nowhere holds no journal\n"),
        ("timeline ./j -o timeline.gif", 2, "error: timeline.gif: the name must end with .html,"),
        ("timeline /nowhere -o timeline.html", 1, "error: /nowhere holds no journal\n"),
        ("top", 3, "error: no fleet of yours runs here"),
        ("up --engin fake", 2, "there is no '--engin' here; did you mean --engine?"),
        ("up --engine fake -o slots=3", 2, "-o is no option here: those of the engine are -e"),
        ("keys shwo", 2, "No such command 'shwo'. Did you mean 'show'?"),
        ("status --jsn", 2, "No such option: --jsn"),
        (
            "status -a tcp://127.0.0.1:1",
            3,
            "error: no router answers at tcp://127.0.0.1:1: nothing",
        ),
        ("dance", 2, "No such command 'dance'."),
        ("statsu", 2, "No such command 'statsu'. Did you mean 'status'?"),
        ("inspct x", 2, "No such command 'inspct'. Did you mean 'inspect'?"),
        ("record ./j --address localhost:1", 2, "an endpoint begins with its transport"),
        ("up --engine fake -e foo=1", 2, "it has slots, max_context"),
        ("up --engine sglang -e arguments=5 --tp 2", 2, "arguments: not an object"),
        ("up --engine sglang --sglang.attn-dp-size 2", 2, "attn_dp_size: 2 cannot be served"),
        ('up --engine sglang -e arguments={"gpu-id-step":2}', 2, "step: 2 cannot be served"),
        ("up --engine sglang --sglang.context_length 9", 2, "use `max_context`"),
        ("up --model Qwen/Qwen3-0.6B", 2, "download it first (hf download Qwen/Qwen3-0.6B)"),
        ("keys allow x --role trainer --name x -l /nowhere/allow.json", 2, "no directory /nowhere"),
        ("keys new a --dir /nowhere", 2, "/nowhere"),
        ("keys new /nowhere/ann", 2, "'/nowhere/ann' is a path, no name: say ann --dir /nowhere/"),
        ("keys new ann@home", 2, "'ann@home' is no name"),
        ("demo -o /proc/runs", 2, "error: output: cannot write /proc/runs: No such file"),
        ("router --takeover 2", 2, "error: --takeover needs --standby or --standby-of"),
        ("status --name elsewhere", 3, "no fleet of yours named 'elsewhere' runs here: none runs"),
        ("record ./j --name elsewhere", 3, "no fleet of yours named 'elsewhere' runs here"),
        ("up --engine fake --name a/b", 2, "error: name: 'a/b' is no name"),
        ("status --name=", 2, "it is empty; give a value, or leave the option out"),
        ("up --engine fake --name=", 2, "it is empty; give a value, or leave the option out"),
        ("pause --worker=", 2, "it is empty; give a value, or leave the option out"),
        ("status --interval 2", 2, "error: --interval needs --watch"),
        ("status --address localhost:1", 2, "an endpoint begins with its transport, e.g. tcp://l"),
        ("up --engine fake -e slots=x", 2, "error: engine_options: slots: Expected `int`, got `st"),
        ("up --engine fake -e grammar=True", 2, "values are JSON: write grammar=true"),
        ("status", 3, "start one with `rolloutbus up`, or say --address\n"),
        ("scale -n 3", 3, "start one with `rolloutbus up`\n"),
        (f"status --key {UNKNOWABLE}/a.key", 2, "File name too long"),
        (f"keys revoke ann -l {UNKNOWABLE}/allow.json", 2, "File name too long"),
        (f"keys invite ann --role worker -l {UNKNOWABLE}/allow.json", 2, "File name too long"),
    ],
)
def test_mistakes_end_with_their_status_and_no_traceback(
    cli: CliRunner, line: str, status: int, complaint: str
) -> None:
    result = cli.invoke(app, line.split())
    assert result.exit_code == status
    assert complaint in result.stderr
    assert "Traceback" not in result.output


def test_engine_options_have_the_type_that_they_look_like() -> None:
    parsed = parse_engine_options(["slots=64", "device=cpu", "prefix_cache=false", "step_s=0.5"])
    assert parsed == {"slots": 64, "device": "cpu", "prefix_cache": False, "step_s": 0.5}


def test_state_line_shows_each_worker_and_the_totals() -> None:
    def worker(name: str) -> WorkerStatus:
        return WorkerStatus(name, "b.1", "ready", "default", 3, "fake", 32, 2, 640, 120, 0.0, 1)

    status = FleetStatus(1, "i", False, [worker("w10"), worker("w9")], {}, 5, 4, 1, {})  # noqa: FBT003
    assert str(state_line(status)) == (
        "w9 ready v3 2/32 | w10 ready v3 2/32 | 4 running, 5 queued, 1 client"
    )
