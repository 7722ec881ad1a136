"""The seeds of one process, told as a line of JSON: `python -m … .share START COUNT`."""

import sys

import msgspec

from tests.drills.simulation.campaign import run_seeds


def main() -> None:
    """Run the seeds that the command line names."""
    start, count = map(int, sys.argv[1:])
    sys.stdout.write(msgspec.json.encode(run_seeds(start, count)).decode() + "\n")


if __name__ == "__main__":
    main()
