"""Whether all workers hold the weights that they say they hold: compared by digest.

With the store's manifest of the version that a worker attests, while the store keeps it; else
with the other workers of that version.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rolloutbus.bus.wire.errors import BusError
from rolloutbus.bus.wire.messages.weights import CheckedWeights

Digests = Mapping[str, int]
"""Tensor -> xxh3-64 of its bytes."""
Version = tuple[str, int]
"""(policy, version)."""


@dataclass(frozen=True, slots=True)
class WorkerWeights:
    """What one worker holds."""

    policy: str
    version: int
    """That it attests."""
    n_tensors: int
    is_in_store: bool
    """Whether it was compared with the store; otherwise with the other workers."""
    different: list[str]
    """Tensors whose bytes are not those of the version."""
    missing: list[str]
    """Tensors that it should hold and does not."""
    not_finite: Mapping[str, int]
    """Tensor -> how many of its numbers are infinite or NaN."""
    zero: list[str]
    """Tensors of which every byte is 0; they may be meant to be."""

    @property
    def is_ok(self) -> bool:
        """It holds the bytes of its version, and all its numbers are finite."""
        return not (self.different or self.missing or self.not_finite)


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What all workers that were asked hold."""

    by_worker: Mapping[str, WorkerWeights]
    errors: Mapping[str, BusError] = field(default_factory=dict[str, BusError])
    """Worker -> why it could not tell."""
    silent: list[str] = field(default_factory=list[str])
    """Workers that had not answered at the deadline, or were lost."""

    @property
    def is_ok(self) -> bool:
        """Everybody answered, and holds what it says it holds."""
        return not self.errors and not self.silent and all(x.is_ok for x in self.by_worker.values())


def compare(
    checked: Mapping[str, tuple[str, CheckedWeights]],
    manifests: Mapping[Version, Digests],
    names: Sequence[str],
) -> dict[str, WorkerWeights]:
    """Judge every worker.

    Args:
        checked: worker -> its policy, and what it answered.
        manifests: of the versions that the store keeps.
        names: the tensors that were asked for; empty: all.
    """
    groups: dict[Version, dict[str, Digests]] = {}
    for worker, (policy, body) in checked.items():
        held = {each.name: each.digest for each in body.tensors}
        groups.setdefault((policy, body.version), {})[worker] = held
    found: dict[str, WorkerWeights] = {}
    for version, members in groups.items():
        whole = manifests.get(version)
        right = _agreed(members.values()) if whole is None else _only(whole, names)
        for worker, held in members.items():
            found[worker] = WorkerWeights(
                policy=version[0],
                version=version[1],
                n_tensors=len(held),
                is_in_store=whole is not None,
                different=[name for name in held if right.get(name) != held[name]],
                missing=[name for name in right if name not in held],
                not_finite=_not_finite(checked[worker][1]),
                zero=[each.name for each in checked[worker][1].tensors if each.is_zero],
            )
    return found


def _agreed(members: Iterable[Digests]) -> dict[str, int | None]:
    """What more than half of those who hold a tensor hold; None where there is no such majority."""
    votes: dict[str, Counter[int]] = {}
    for held in members:
        for name, digest in held.items():
            votes.setdefault(name, Counter())[digest] += 1
    agreed: dict[str, int | None] = {}
    for name, counted in votes.items():
        [(digest, n_votes)] = counted.most_common(1)
        agreed[name] = digest if 2 * n_votes > counted.total() else None
    return agreed


def _only(whole: Digests, names: Sequence[str]) -> Mapping[str, int | None]:
    return {name: digest for name, digest in whole.items() if not names or name in names}


def _not_finite(body: CheckedWeights) -> dict[str, int]:
    return {each.name: each.n_not_finite for each in body.tensors if each.n_not_finite}
