"""What can be said of a fleet on Ray without a cluster: options, and which bundles workers get."""

from typing import Any

import pytest

from rolloutbus import RayLauncher
from rolloutbus.errors import SettingsError
from rolloutbus.launcher.on_ray.placement import Demand, seats_in

GPU = {"CPU": 1.0, "GPU": 1.0}
TWO_NODES = {0: "a", 1: "b", 2: "a", 3: "b", 4: "a"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"strategy": "PAK"}, "strategy: 'PAK'"),
        ({"gpu_share": 0.0}, "gpu_share: 0.0 is not above 0"),
        ({"gpu_share": "half"}, "gpu_share: 'half': Expected `float`"),
        ({"gpus_per_worker": -1}, "gpus_per_worker: 0 or more"),
        ({"cpus_per_worker": float("nan")}, "cpus_per_worker: nan is no amount"),
        ({"resources_per_worker": {"slot": -1.0}}, "slot: -1.0 is no amount"),
        ({"resources_per_worker": {"GPU": 1.0}}, "use gpus_per_worker"),
        ({"bundles": [0]}, "of which placement_group"),
        ({"placement_group": object(), "bundles": []}, "none is named"),
        ({"placement_group": object(), "strategy": "SPREAD"}, "leave strategy and node_labels out"),
        ({"placement_group": object(), "node_labels": {"a": "b"}}, "leave strategy and"),
    ],
)
def test_what_cannot_work_is_said_at_once(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        RayLauncher(**options)


def test_a_worker_gets_a_bundle_that_has_all_it_asks_for() -> None:
    bundles = {index: {"CPU": 1.0, "GPU": 2.0} for index in range(3)}
    assert seats_in(bundles, TWO_NODES, Demand(2, 1.0, {"CPU": 1.0}), 2) == [[0], [1], [2]]


def test_workers_share_a_large_bundle_when_each_has_one() -> None:
    bundles = {0: {"CPU": 8.0, "GPU": 4.0}, 1: {"CPU": 8.0, "GPU": 2.0}}
    demand = Demand(2, 1.0, {"CPU": 1.0})
    assert seats_in(bundles, TWO_NODES, demand, 1) == [[0], [1], [0]], "all, for workers to come"
    with pytest.raises(SettingsError, match=r"room for 3 of 4 workers; each .* 2 GPU, 1 CPU"):
        seats_in(bundles, TWO_NODES, demand, 4)


def test_gpus_of_a_worker_in_several_bundles_are_on_one_node() -> None:
    bundles = dict.fromkeys(range(5), GPU)
    demand = Demand(2, 1.0, {"CPU": 1.0})
    assert seats_in(bundles, TWO_NODES, demand, 2) == [[0, 2], [1, 3]]
    with pytest.raises(SettingsError, match="room for 2 of 3 workers"):
        seats_in(bundles, TWO_NODES, demand, 3)


def test_a_share_of_a_gpu_leaves_room_for_others_in_the_bundle() -> None:
    demand = Demand(1, 0.25, {"CPU": 0.0})
    assert seats_in({0: GPU}, TWO_NODES, demand, 4) == [[0], [0], [0], [0]]
    pair = Demand(2, 0.5, {"CPU": 0.5})
    assert seats_in({0: GPU, 2: GPU}, TWO_NODES, pair, 1) == [[0, 2]], "two GPUs, not one twice"
