"""The files of deploy/, the commands of ours in them, and the tools that check them."""

import os
import re
import shlex
import shutil
import string
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from rolloutbus.cli.app import app
from tests.architecture.source_tree import ROOT

DEPLOY = ROOT / "deploy"
MAKE_KEYS = DEPLOY / "make-keys.sh"
SLURM = DEPLOY / "slurm" / "rolloutbus.sbatch"
KUBERNETES = DEPLOY / "kubernetes"
SYSTEMD = DEPLOY / "systemd"
TOOLS = ROOT / ".venv-deploy" / "bin"
HERE = ROOT / ".venv" / "bin"
OURS = "rolloutbus"
COMMAND_S = 280
UNITS = sorted(SYSTEMD.glob("*.service"))

Words = list[str]
"""One command of ours, after its name."""


def tool(name: str) -> str:
    """Path of a program; skips the test, saying what to install, if it is not here."""
    found = shutil.which(name, path=f"{TOOLS}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not here: apt install it, or make .venv-deploy/.installed")
    return found


def output_of(*command: str | Path) -> str:
    """What a program prints; fails with what it complains of."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_S,
        env=environment_with_ours(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment_with_ours(**more: str) -> dict[str, str]:
    """Ours is the first on the path, as in an activated environment; it runs this checkout."""
    path = f"{HERE}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, **more}


def parse(words: Sequence[str]) -> dict[str, Any]:
    """The options of one of our commands, as its own parser reads them.

    Raises:
        Exception: click's: there is no such command or option, or a value is wrong.
    """
    rest, name = list(words), OURS
    command: Any = typer.main.get_group(app)
    while hasattr(command, "get_command"):
        name, *rest = rest
        found = command.get_command(
            command.make_context(OURS, [name], resilient_parsing=True), name
        )
        assert found is not None, f"there is no command {name}"
        command = found
    context = command.make_context(name, rest)
    foreign = [each for each in context.args if each.startswith("-")]
    assert all(each.startswith("--sglang.") for each in foreign), foreign
    return context.params


def ours_in(shell: str, variables: Mapping[str, str]) -> Iterator[Words]:
    """Each command of ours in a shell script, with its variables replaced."""
    text = shell.replace("\\\n", " ")
    for name, value in variables.items():
        text = re.sub(rf"\${name}\b", value, text)
    for found in re.finditer(rf"(?<![\w./-]){OURS} ([a-z]+ [^|&;>\n]*)", text):
        yield [word for word in shlex.split(found[1], comments=True) if not word.startswith("${")]


def units_of(path: Path) -> dict[str, list[str]]:
    """Settings of a unit file by name, in order, with continued lines joined."""
    settings: dict[str, list[str]] = {}
    for line in path.read_text().replace("\\\n", " ").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings.setdefault(name, []).append(value)
    return settings


def unit_command(path: Path) -> Words:
    """What a unit starts, with the values of its environment file."""
    kind = path.stem.removeprefix("rolloutbus-").removesuffix("@")
    lines = (SYSTEMD / "env" / f"{kind}.env").read_text().splitlines()
    values = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    values["STATE_DIRECTORY"] = "/var/lib/rolloutbus"
    [command] = units_of(path)["ExecStart"]
    program, *words = shlex.split(string.Template(command).substitute(values))
    assert Path(program).name == OURS
    return words


def rendered(keys: Path, scratch: Path) -> list[dict[str, Any]]:
    """The manifests as `kubectl apply --kustomize` would send them, with these keys."""
    copy = scratch / "kubernetes"
    shutil.copytree(KUBERNETES, copy, ignore=shutil.ignore_patterns("keys"))
    shutil.copytree(keys, copy / "keys")
    return list(yaml.safe_load_all(output_of(tool("kubectl"), "kustomize", copy)))


def pods_of(manifests: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod's specification of each member, by its name."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in manifests
        if each["kind"] in ("StatefulSet", "Deployment")
    }


def probes_of(container: Mapping[str, Any]) -> dict[str, Words]:
    """The commands of its probes, by the probe's name."""
    return {
        name: container[name]["exec"]["command"]
        for name in ("readinessProbe", "livenessProbe")
        if "exec" in container.get(name, {})
    }
