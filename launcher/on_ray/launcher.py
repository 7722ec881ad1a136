"""What a user says about a fleet on Ray: what each worker is given, and where."""

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal, get_type_hints

import msgspec

from rolloutbus.bus.wire.errors import SettingsError

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


class RayLauncher(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fleet on a Ray cluster: `rolloutbus.up(launcher=RayLauncher(…), …)`; docs/ray.md.

    Ray gives each process an actor; workers have a bundle of a placement group each. Router, weight
    store and gateway run on the node of the program that brings the fleet up.
    """

    address: str = ""
    """Of the Ray cluster; only where the program has not called `ray.init`. Empty: `auto`, the one
    that runs here. `local`: a new one, which ends with the fleet."""
    placement_group: Any = None
    """A group of the program's own, which outlives the fleet; None: one is made for the workers."""
    bundles: Sequence[int] | None = None
    """Which bundles of that group the workers may use; None: all."""
    strategy: Strategy = "PACK"
    """How a group that is made spreads the workers over the nodes."""
    gpus_per_worker: int | None = None
    """None: as many as the engine's arguments say (`tp_size` x `pp_size` x `dp_size`); none for
    `device="cpu"` and the fake engine; for transformers with `device="auto"`, 1 if the cluster has
    any."""
    gpu_share: float = 1.0
    """Of each of these GPUs that Ray counts as used; less where a trainer's actors share them."""
    cpus_per_worker: float = 1.0
    """CPUs that Ray counts as used by a worker."""
    resources_per_worker: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    """Further resources of Ray's, e.g. `{"TPU": 4}` or one that only some nodes have."""
    node_labels: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    """Node affinity: workers run on nodes with these labels only, e.g.
    `{"ray.io/accelerator-type": "in(H100,H200)"}` or `{"ray.io/node-id": ID}`."""

    def __post_init__(self) -> None:
        for name, annotation in get_type_hints(RayLauncher).items():
            try:
                msgspec.convert(getattr(self, name), annotation)
            except msgspec.ValidationError as error:
                raise SettingsError(f"{name}: {getattr(self, name)!r:.80}: {error}") from error
        if self.bundles is not None and self.placement_group is None:
            raise SettingsError("bundles: of which placement_group? Give that, too")
        if self.placement_group is not None:
            if self.node_labels or self.strategy != "PACK":
                raise SettingsError(
                    "placement_group: it has a strategy and labels of its own: leave strategy and "
                    "node_labels out"
                )
            if not self.bundles and self.bundles is not None:
                raise SettingsError("bundles: none is named; leave it out for all of them")
        if self.gpus_per_worker is not None and self.gpus_per_worker < 0:
            raise SettingsError("gpus_per_worker: 0 or more")
        if not 0 < self.gpu_share <= 1:
            raise SettingsError(f"gpu_share: {self.gpu_share} is not above 0 and at most 1")
        amounts = {"cpus_per_worker": self.cpus_per_worker, **self.resources_per_worker}
        for name, amount in amounts.items():
            if not 0 <= amount < math.inf:
                raise SettingsError(f"{name}: {amount} is no amount")
        for name, place in (("CPU", "cpus_per_worker"), ("GPU", "gpus_per_worker")):
            if name in self.resources_per_worker:
                raise SettingsError(f"resources_per_worker: {name}: use {place}")
        if find_spec("ray") is None:
            raise SettingsError("launcher: it needs ray: pip install rolloutbus[ray]")
