"""Make a recorded run of the demo again: the very batches, and every loss comes out as it did then.

    rolloutbus demo --record journal
    python -m rolloutbus.examples.retrain journal runs/RUN

A recording has each token with the logprob and the version of its sampling, so what was trained
then can be trained again without a fleet; to look into a step that went wrong, for one.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rolloutbus import OfflineRollouts
from rolloutbus.errors import BusError
from rolloutbus.examples.rollouts import Group

SHOW_EVERY = 10


def retrain(source: OfflineRollouts, run: Path) -> Iterator[tuple[float, float]]:
    """Make each step of a run of the demo again; yields its loss then, and now."""
    config = json.loads((run / "config.json").read_text())
    found = {each.rollout.rid: each for each in source}
    # torch takes seconds to import: after what may be wrong with the arguments.
    import torch  # noqa: PLC0415

    from rolloutbus.examples.grpo import Learner, LearnerOptions  # noqa: PLC0415
    from rolloutbus.examples.tiny_model import load_tiny_model  # noqa: PLC0415
    from rolloutbus.examples.training import make_batch  # noqa: PLC0415

    torch.set_num_threads(1)  # as in the demo: sums of floats depend on it
    learner = Learner(load_tiny_model(run / "model"), LearnerOptions(steps=config["steps"]))
    size: int = config["group_size"]
    for line in (run / "metrics.jsonl").read_text().splitlines():
        step: dict[str, Any] = json.loads(line)
        rows = [found[rid] for rid in step["rids"]]
        groups = [
            Group(rows[i].group, [each.rollout for each in rows[i : i + size]])
            for i in range(0, len(rows), size)
        ]
        yield step["loss"], learner.step(make_batch(groups)[0]).loss


def main() -> None:
    """Train, and compare."""
    parser = argparse.ArgumentParser(description="Make a recorded run of the demo again.")
    parser.add_argument("source", help="a journal's directory, or an export (.parquet, .jsonl)")
    parser.add_argument("run", type=Path, help="directory of that run, e.g. runs/RUN")
    options = parser.parse_args()
    try:
        _compare(retrain(OfflineRollouts(options.source), options.run))
    except (BusError, OSError) as error:
        sys.exit(f"error: {error}")


def _compare(losses: Iterator[tuple[float, float]]) -> None:
    worst = 0.0
    for number, (then, now) in enumerate(losses, 1):
        worst = max(worst, abs(now - then))
        if number % SHOW_EVERY == 0:
            print(f"step {number:4d}  loss then {then:+.6f}  now {now:+.6f}")
    print(f"largest difference of a loss: {worst:.2g}")


if __name__ == "__main__":
    main()
