"""Two trainers publish weights of one policy: what TRL's client tells the first one.

Run by the tests beside it, in an environment with TRL: `two_trainers_program.py ADDRESS MODEL`.
"""

# pyright: basic, reportMissingImports=false
# What it imports is installed in the environment that runs it.

import sys
from pathlib import Path

from rolloutbus.errors import StaleVersion
from rolloutbus.examples.tiny_model import load_tiny_model
from rolloutbus.trainer_adapter.frameworks.trl import FleetClient, FleetOptions


def main() -> None:
    address, model = sys.argv[1:3]
    weights = load_tiny_model(Path(model)).state_dict()
    first, second = (FleetClient(FleetOptions(address=address, deadline_s=240)) for _ in range(2))
    first.publish(iter(weights.items()))
    first.generate([[1, 5]], max_tokens=4)
    second.publish(iter(weights.items()))
    second.generate([[1, 5]], max_tokens=4)
    try:
        first.generate([[1, 5]], max_tokens=4)
    except StaleVersion as error:
        print(error)


if __name__ == "__main__":
    main()
