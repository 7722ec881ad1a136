"""What adapters share: where a fleet is, and how the ranks of a trainer bring weights there."""

import atexit
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.client.sync_client import SyncRolloutClient, connect_sync
from rolloutbus.trainer_adapter.publisher.sync_publisher import SyncWeightPublisher
from rolloutbus.trainer_adapter.publisher.tensor_source import Rename
from rolloutbus.trainer_adapter.publisher.transfer import Published, Requirement

Pair = tuple[str, torch.Tensor]


@strict()
@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Where a fleet is, and how a trainer uses it. Can be pickled: other processes connect anew.

    An option that is misspelt is a TypeError, a value that no option has a SettingsError.
    """

    address: str
    """Of the router, as `rolloutbus up` prints it."""
    key_file: str = ""
    """The trainer's key, if the fleet wants one."""
    policy: str = "default"
    """Whose weights."""
    dtype: str = ""
    """The engines', which weights are cast to on the way; empty: they stay as the trainer has them,
    and engines with another one refuse them."""
    require: Requirement = "all"
    """How many workers must have a new version; see `WeightPublisher.publish`."""
    deadline_s: float = 600.0
    """For a batch, and for an update, seconds."""

    def __post_init__(self) -> None:
        if not 0 < self.deadline_s < math.inf:
            raise SettingsError(f"deadline_s={self.deadline_s}: say a number of seconds above 0")
        if self.dtype and self.torch_dtype is None:
            raise SettingsError(f"dtype={self.dtype!r}: say bfloat16, float16 or float32, or ''")

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """What weights are cast to; None: they are not."""
        found = getattr(torch, self.dtype, None) if self.dtype else None
        return found if isinstance(found, torch.dtype) else None


def connected(fleet: FleetOptions) -> SyncRolloutClient:
    """A client of the fleet, which is closed when this process ends.

    Raises:
        PeerLost: no router answers there.
        SettingsError: the address is not allowed without keys.
    """
    client = connect_sync(fleet.address, key_file=fleet.key_file).open()
    atexit.register(client.close)
    return client


class GatheredWeights:
    """Publishes tensors that all ranks of a trainer gather; the first rank has one of these."""

    def __init__(
        self,
        client: SyncRolloutClient,
        fleet: FleetOptions,
        *,
        rename: Rename | None = None,
    ) -> None:
        """Nothing is sent yet. `rename` is as of `WeightPublisher`."""
        self._fleet = fleet
        self._publisher = SyncWeightPublisher(
            client, fleet.policy, dtype=fleet.torch_dtype, rename=rename
        )
        self._layout: list[tuple[str, torch.dtype, list[int]]] | None = None

    def publish(self, tensors: Iterator[Pair]) -> Published:
        """Bring a version to the workers, one tensor at a time.

        `tensors` are read to their end also when it fails, because to gather them takes all ranks.
        The first time they are held in host memory: their names and shapes are not known yet.

        Raises:
            BusError: as of `WeightPublisher.publish`. The workers have the older version still.
        """
        found: list[tuple[str, torch.dtype, list[int]]] = []
        try:
            published = self._publisher.publish(
                _kept_open(tensors, found),
                layout=self._layout,
                require=self._fleet.require,
                deadline_s=self._fleet.deadline_s,
            )
        finally:
            for _ in tensors:
                pass
        self._layout = found
        return published


def _kept_open(
    tensors: Iterator[Pair], layout: list[tuple[str, torch.dtype, list[int]]]
) -> Iterator[Pair]:
    """The same, noted in `layout`; closing it leaves `tensors` open for the rest."""
    for name, tensor in tensors:
        layout.append((name, tensor.dtype, list(tensor.shape)))
        yield name, tensor
