"""Stands for `srun` and `scancel`, so that the job's script can run without Slurm.

It shows what the script does, and nothing about Slurm. A step's tasks run on this host. As Slurm's
cgroup plugin does, `scancel` signals the tasks themselves and not what they have started.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path


def srun(arguments: list[str]) -> int:
    """Run the tasks of a step to their end; the highest exit status of one."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("nodes", "cpus-per-task", "gpus", "nodelist", "kill-on-bad-exit", "wait"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--ntasks", type=int, default=int(os.environ["SLURM_NTASKS"]))
    parser.add_argument("--output", required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args(arguments)
    step = _new_step()
    tasks: list[subprocess.Popen[bytes]] = []
    for number in range(asked.ntasks):
        with Path(asked.output.replace("%t", str(number))).open("wb") as log:
            place = {"SLURM_PROCID": str(number), "SLURM_STEP_ID": step.name}
            tasks.append(
                subprocess.Popen(asked.command, stdout=log, stderr=log, env={**os.environ, **place})
            )
        (step / str(tasks[-1].pid)).touch()
    return max(task.wait() % 256 for task in tasks)


def _steps() -> Path:
    """Holds a directory for each step, with a file for each task, named after its process."""
    return Path(os.environ["SLURM_STAND_IN"])


def _new_step() -> Path:
    for number in range(9):
        step = _steps() / str(number)
        try:
            step.mkdir()
        except FileExistsError:
            continue
        return step
    raise AssertionError("more steps than the script has")


def scancel(arguments: list[str]) -> int:
    """Signal the tasks of one step."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--signal", choices=["TERM"], required=True)
    parser.add_argument("step")
    asked = parser.parse_args(arguments)
    job, _, step = asked.step.partition(".")
    assert job == os.environ["SLURM_JOB_ID"], asked.step
    for task in (_steps() / step).iterdir():
        os.kill(int(task.name), signal.SIGTERM)
    return 0


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    sys.exit({"srun": srun, "scancel": scancel}[name](rest))
