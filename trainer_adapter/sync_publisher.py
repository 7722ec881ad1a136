"""Publishing weights from a plain script: `WeightPublisher`, blocking."""

import torch

from bus.messages.weights import InFlight
from trainer_adapter.named_tensors import Tensors
from trainer_adapter.publisher import Published, WeightPublisher
from trainer_adapter.sync_client import SyncFleetClient


class SyncWeightPublisher:
    """Publishes versions of one policy; see `WeightPublisher`."""

    def __init__(
        self, client: SyncFleetClient, policy: str = "default", *, dtype: torch.dtype | None = None
    ) -> None:
        self._client = client
        self._publisher = WeightPublisher(client.async_client, policy, dtype=dtype)

    def publish(
        self,
        tensors: Tensors,
        *,
        in_flight: InFlight = "in_place",
        require: str = "any",
        deadline_s: float = 120.0,
    ) -> Published:
        """Bring these weights to every worker of the policy; see `WeightPublisher.publish`."""
        return self._client.run(
            self._publisher.publish(
                tensors, in_flight=in_flight, require=require, deadline_s=deadline_s
            )
        )
