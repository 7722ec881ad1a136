"""`python -m tests.drills.weights`: all the cases or some; exit status 1: something is wrong."""

import argparse
import asyncio
import secrets
import sys

import msgspec

from tests.drills.weights.cases import N_CELLS
from tests.drills.weights.run import run_weight_faults
from tests.drills.weights.settings import WeightDrillSettings


def main() -> int:
    """Run and print one JSON object, last."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills.weights", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="repeat an earlier run")
    parser.add_argument("--cases", type=int, default=N_CELLS, help="deaths; the matrix has all")
    parser.add_argument("--first", type=int, default=0, help="begin with this one")
    parser.add_argument("--out", default="", help="keep histories and logs in this new directory")
    given = parser.parse_args()
    settings = WeightDrillSettings(
        seed=secrets.randbelow(1 << 32) if given.seed is None else given.seed,
        cases=given.cases,
        first=given.first,
        directory=given.out,
    )
    sys.stderr.write(f"seed {settings.seed}\n")
    found = asyncio.run(run_weight_faults(settings, _show))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    return 1 if found.problems or found.late else 0


def _show(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
