"""Which bundles of a placement group a worker gets: one, or one GPU each of several.

Pure: a group is known here by the resources and the nodes of its bundles.
"""

from collections.abc import Mapping, Sequence

import msgspec

from rolloutbus.bus.wire.errors import SettingsError

Resources = Mapping[str, float]
"""Name, as Ray knows it -> amount."""


class Demand(msgspec.Struct, frozen=True):
    """What one worker asks for."""

    n_gpus: int
    gpu_share: float
    """Of each of them."""
    others: Resources
    """CPUs among them."""

    @property
    def whole(self) -> dict[str, float]:
        """All of it, in one bundle."""
        gpus = self.n_gpus * self.gpu_share
        return {**({"GPU": gpus} if gpus else {}), **{k: v for k, v in self.others.items() if v}}


def seats_in(
    bundles: Mapping[int, Resources], nodes: Mapping[int, str], demand: Demand, n_workers: int
) -> list[list[int]]:
    """Bundles of each worker that has room: as many workers to a bundle as it can hold.

    Where no bundle has all GPUs of a worker, it gets one each of several bundles on one node; so
    it does where it gets shares, since Ray would take two halves for one GPU.

    Args:
        bundles: index -> resources, those that may be used.
        nodes: index -> node.
        demand: of a worker.
        n_workers: how many there must be room for, at least.

    Raises:
        SettingsError: they have no room for so many.
    """
    has_whole = any(_fits(demand.whole, each) for each in bundles.values())
    if demand.n_gpus > 1 and (demand.gpu_share < 1 or not has_whole):
        seats = _side_by_side(bundles, nodes, demand)
    else:
        seats = [[index] for index in _one_each(bundles, demand.whole)]
    if len(seats) < n_workers:
        raise SettingsError(
            f"placement_group: its bundles have room for {len(seats)} of {n_workers} workers; "
            f"each worker asks for {shown(demand.whole)}, all on one node"
        )
    return seats


def shown(resources: Resources) -> str:
    """`2 GPU, 1 CPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _one_each(bundles: Mapping[int, Resources], wanted: Resources) -> list[int]:
    """The bundle of each worker, in order: round by round, so that all bundles are used."""
    seats: list[int] = []
    rooms = {index: _room(bundle, wanted) for index, bundle in bundles.items()}
    while any(rooms.values()):
        for index, room in rooms.items():
            if room:
                seats.append(index)
                rooms[index] -= 1
    return seats


MOST_PER_BUNDLE = 1024
"""Workers that ask for nothing have room in any bundle."""


def _room(bundle: Resources, wanted: Resources) -> int:
    rooms = [int(bundle.get(name, 0) / amount + 1e-6) for name, amount in wanted.items() if amount]
    return min(rooms, default=MOST_PER_BUNDLE)


def _fits(wanted: Resources, bundle: Resources) -> bool:
    return _room(bundle, wanted) > 0


def _side_by_side(
    bundles: Mapping[int, Resources], nodes: Mapping[int, str], demand: Demand
) -> list[list[int]]:
    first = {**demand.others, "GPU": demand.gpu_share}
    with_gpu = [index for index, each in bundles.items() if _fits({"GPU": first["GPU"]}, each)]
    by_node: dict[str, list[int]] = {}
    for index in with_gpu:
        by_node.setdefault(nodes[index], []).append(index)
    seats: list[list[int]] = []
    for indices in by_node.values():
        for start in range(0, len(indices) - demand.n_gpus + 1, demand.n_gpus):
            seat: Sequence[int] = indices[start : start + demand.n_gpus]
            if _fits(first, bundles[seat[0]]):
                seats.append(list(seat))
    return seats
