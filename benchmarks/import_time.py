"""Measures the CPU time of imports and of the command line, beside what every client needs.

    python -m benchmarks.import_time [--rounds 11]

Each round starts one interpreter for each row, in turn; the medians are compared.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence

BASE = "numpy, zmq and msgspec"
ROWS: dict[str, Sequence[str]] = {
    BASE: ("-c", "import numpy, zmq, msgspec"),
    "import rolloutbus": ("-c", "import rolloutbus"),
    "rolloutbus.connect": ("-c", "from rolloutbus import connect"),
    "rolloutbus --version": ("-m", "rolloutbus.cli.main", "--version"),
    "rolloutbus status --help": ("-m", "rolloutbus.cli.main", "status", "--help"),
    "rolloutbus up --help": ("-m", "rolloutbus.cli.main", "up", "--help"),
    "rolloutbus --help": ("-m", "rolloutbus.cli.main", "--help"),
}


def cpu_s(arguments: Sequence[str]) -> float:
    """CPU seconds of one interpreter, from its start to its end."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    spent = after.children_user - before.children_user
    return spent + after.children_system - before.children_system


def main() -> None:
    """Print one JSON object: row -> [median CPU seconds, ratio to the first row]."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {name: [] for name in ROWS}
    for _ in range(rounds):
        for name, arguments in ROWS.items():
            seconds[name].append(cpu_s(arguments))
    medians = {name: statistics.median(spent) for name, spent in seconds.items()}
    shown = {name: [round(s, 3), round(s / medians[BASE], 2)] for name, s in medians.items()}
    print(json.dumps(shown, indent=2))


if __name__ == "__main__":
    main()
