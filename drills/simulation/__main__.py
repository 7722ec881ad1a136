"""`python -m drills.simulation START COUNT`: the seeds of one process, as one line of JSON."""

import sys

import msgspec

from drills.simulation.campaign import run_seeds


def main() -> None:
    """Run the seeds that the command line names."""
    start, count = map(int, sys.argv[1:])
    sys.stdout.write(msgspec.json.encode(run_seeds(start, count)).decode() + "\n")


if __name__ == "__main__":
    main()
