"""The Python interpreter of workers, engines and gateway: perhaps of another environment.

SGLang pins versions of its packages that a client or a trainer may not want. What both sides share
is the wire, so their environments need to agree on rolloutbus alone.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rolloutbus.bus.wire.codec import PROTOCOL_VERSION
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.launcher.version import DISTRIBUTION, installed_version

PROBE = """
import importlib.util, json, sys
import rolloutbus.engine_worker.worker.actor, rolloutbus.engine_worker.host.__main__
from rolloutbus.bus.wire.codec import PROTOCOL_VERSION
from rolloutbus.launcher.version import installed_version
report = {
    "protocol": PROTOCOL_VERSION,
    "version": installed_version(),
    "missing": [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None],
}
print("told:" + json.dumps(report))
"""
"""Imports all that a worker needs before it builds its engine."""
TIMEOUT_S = 300.0
"""Its imports take a second, and on a cold or busy machine minutes."""


class InterpreterReport(msgspec.Struct):
    """An interpreter's report of itself."""

    protocol: int
    version: str
    missing: list[str]


def find_python(python: str | os.PathLike[str]) -> str:
    """The interpreter that an operator means: a file, a command, or an environment's directory.

    Raises:
        SettingsError: there is none.
    """
    given = os.fspath(python)
    directory = Path(given)
    found = shutil.which(directory / "bin" / "python" if directory.is_dir() else given)
    if found is None:
        raise SettingsError(f"python: {given} is neither an interpreter nor an environment of one")
    # Its links stay: an environment's interpreter is one, and finds its packages by its own place.
    return str(Path(found).absolute())


def check_python(python: str, packages: Sequence[str], environment: Mapping[str, str]) -> None:
    """Ask an interpreter whether it can run our workers.

    Args:
        python: as `find_python` gives it.
        packages: that engine and gateway need.
        environment: of the processes.

    Raises:
        SettingsError: it cannot; says what it lacks.
    """
    report = _asked([python, "-c", PROBE, *packages], environment)
    mine = installed_version()
    if report.protocol != PROTOCOL_VERSION or report.version != mine:
        raise SettingsError(
            f"python: {python} has {DISTRIBUTION} {report.version} with protocol "
            f"{report.protocol}, and {sys.executable} has {mine} with protocol {PROTOCOL_VERSION}: "
            "install the same version in both"
        )
    if report.missing:
        raise SettingsError(
            f"python: the fleet needs {', '.join(report.missing)}, which {python} does not have"
        )


def _asked(command: Sequence[str], environment: Mapping[str, str]) -> InterpreterReport:
    python = command[0]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingsError(f"python: {python} does not run: {error}") from error
    lines = done.stdout.decode(errors="replace").splitlines()
    reports = [line.removeprefix("told:") for line in lines if line.startswith("told:")]
    if done.returncode == 0 and reports:
        return msgspec.json.decode(reports[-1], type=InterpreterReport)
    complaints = done.stderr.decode(errors="replace").strip().splitlines()
    raise SettingsError(
        f"python: {python} cannot run a worker ({complaints[-1] if complaints else 'silent'}): "
        f"{DISTRIBUTION} has to be installed there, or be on its path"
    )
