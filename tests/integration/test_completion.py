"""Shells complete commands and options, set up as the page on the command line says."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rolloutbus.launcher.plan import environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

DEADLINE_S = 240.0
"""Our command is started for each tab."""
PROMPT = "READY>"
TYPED = "rolloutbus key\tinv\t--minu\t"
COMPLETED = "rolloutbus keys invite --minutes"
TO_THE_BEGINNING = "\x01"
_SHOWN = re.compile(r"\n(?:\x1b\S*?)?SEEN: (.*?) *\r?\n")


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Of a shell whose home is empty, and that finds our command."""
    found = {name: value for name, value in environment().items() if not name.startswith("XDG_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{found['PATH']}"
    return {**found, "PATH": path, "HOME": str(tmp_path), "TERM": "dumb", "EDITOR": "emacs"}


def shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} here: apt install {name}")
    return found


def read_until(terminal: int, end: str | re.Pattern[str]) -> str:
    """What a shell shows until then."""
    shown, ends_at = "", time.monotonic() + DEADLINE_S
    while not re.search(end, shown):
        ready, _, _ = select.select([terminal], [], [], max(0.0, ends_at - time.monotonic()))
        assert ready, shown
        shown += os.read(terminal, 4096).decode()
    return shown


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_tab_completes_what_was_begun(name: str, tmp_path: Path, variables: dict[str, str]) -> None:
    command = [shell(name), "-i"]
    settings = f'eval "$(rolloutbus completion {name})"\nPS1="{PROMPT}"\n'
    (tmp_path / f".{name}rc").write_text(settings, encoding="utf-8")
    terminal, its_end = pty.openpty()
    with subprocess.Popen(
        command,
        env=variables,
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        start_new_session=True,
    ) as process:
        try:
            read_until(terminal, PROMPT)
            # The whole line becomes the argument of an `echo`.
            os.write(terminal, f"{TYPED}{TO_THE_BEGINNING}echo SEEN: \r".encode())
            found = _SHOWN.search(read_until(terminal, _SHOWN))
            assert found is not None
            assert found[1] == COMPLETED
        finally:
            process.kill()
            os.close(terminal)
            os.close(its_end)


def test_fish_knows_what_may_follow(tmp_path: Path, variables: dict[str, str]) -> None:
    where = tmp_path / ".config" / "fish" / "completions"
    where.mkdir(parents=True)
    set_up = f"rolloutbus completion fish > {where}/rolloutbus.fish"
    command = [shell("fish"), "-c", f"{set_up}; complete -C '{COMPLETED[:-2]}'"]
    shown = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
    assert shown.stdout.startswith("--minutes\t")
