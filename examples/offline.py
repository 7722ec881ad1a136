"""Train the demo's model from a recording of the demo: no router, no engines, no waiting.

    rolloutbus demo --record journal
    rolloutbus export journal -o trajectories.parquet
    python -m rolloutbus.examples.offline trajectories.parquet

A model that starts anew learns from what others sampled: `examples.imitation` is how.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rolloutbus import OfflineRollouts
from rolloutbus.errors import BusError
from rolloutbus.examples.rollouts import Group
from rolloutbus.types import OfflineRollout

GROUPS_PER_STEP = 8
GROUP_SIZE = 8
SHOW_EVERY = 10


def steps(source: OfflineRollouts) -> Iterator[list[Group]]:
    """What each step trains on: groups as they ended, some at a time."""
    groups = map(_group, source.groups(GROUP_SIZE))
    while len(some := list(islice(groups, GROUPS_PER_STEP))) == GROUPS_PER_STEP:
        yield some


def _group(rows: list[OfflineRollout]) -> Group:
    return Group(rows[0].group, [each.rollout for each in rows])  # the demo names groups by word


def main() -> None:
    """Train, and say what came of it."""
    parser = argparse.ArgumentParser(description="Train a new model from a recording of the demo.")
    parser.add_argument("source", help="a journal's directory, or an export (.parquet, .jsonl)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of that run of the demo")
    options = parser.parse_args()
    try:
        source = OfflineRollouts(options.source)
        n_steps = sum(1 for _ in steps(source))
    except BusError as error:
        sys.exit(f"error: {error}")
    if not n_steps:
        sys.exit(
            f"error: {options.source} has less than one step: {GROUPS_PER_STEP} groups of "
            f"{GROUP_SIZE} rollouts"
        )
    _train(source, n_steps, options.seed)


def _train(source: OfflineRollouts, n_steps: int, seed: int) -> None:
    # torch takes seconds to import: after what may be wrong with the arguments.
    import torch  # noqa: PLC0415

    from rolloutbus.examples.imitation import evaluate, train  # noqa: PLC0415
    from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model  # noqa: PLC0415

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        build_tiny_model(Path(folder), seed)
        model = load_tiny_model(Path(folder))
    print(f"held-out reward before: {evaluate(model, seed):.3f}")
    for number, rewards in enumerate(train(steps(source), model, n_steps), 1):
        if number % SHOW_EVERY == 0:
            print(f"step {number:4d} of {n_steps}  reward of its rollouts {rewards:.2f}")
    print(f"held-out reward after:  {evaluate(model, seed):.3f}")


if __name__ == "__main__":
    main()
