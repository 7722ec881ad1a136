"""Who swaps next, so that enough workers go on serving meanwhile.

Spec: docs/protocol.md, "Weights", 2.
"""

from collections.abc import Collection, Sequence


def next_wave(left: Sequence[str], serving: Collection[str], floor: int) -> list[str]:
    """The workers whose commit begins now; never none while some are left.

    Args:
        left: prepared workers that have not begun, in the order in which they shall.
        serving: all workers of the policy that take requests now, whether they take part or not.
        floor: so many of those go on meanwhile; where there are too few, one at a time swaps.
    """
    if floor == 0:
        return list(left)
    idle = [name for name in left if name not in serving]
    n_spare = max(len(serving) - floor, 0 if idle else 1)
    return idle + [name for name in left if name in serving][:n_spare]
