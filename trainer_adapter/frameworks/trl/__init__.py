"""TRL's trainers on a fleet: what they ask of a vLLM server, the bus does.

Written for TRL 1.16. `GRPOTrainer` samples through `FleetGeneration` (see `use_fleet`) or through
`RolloutFunc`; `AsyncGRPOTrainer` takes a `FleetRolloutWorker` and its `weight_transfer`.
"""

from rolloutbus.trainer_adapter.frameworks.fleet import FleetOptions
from rolloutbus.trainer_adapter.frameworks.trl.async_grpo import (
    FleetRolloutWorker,
    FleetWeightTransfer,
)
from rolloutbus.trainer_adapter.frameworks.trl.fleet_client import FleetClient
from rolloutbus.trainer_adapter.frameworks.trl.grpo import FleetGeneration, RolloutFunc, use_fleet

__all__ = [
    "FleetClient",
    "FleetGeneration",
    "FleetOptions",
    "FleetRolloutWorker",
    "FleetWeightTransfer",
    "RolloutFunc",
    "use_fleet",
]
