"""verl's trainers on a fleet: its servers, its load balancer and its checkpoint engine, by the bus.

Written for verl 0.9.1. `VERL_USE_EXTERNAL_MODULES` names this package; then `rolloutbus` is the
name of a rollout (`FleetReplica`, `FleetRollout`) and of a checkpoint engine
(`FleetCheckpointEngine`). `FleetLoadBalancer` is the router class.
"""

# pyright: basic, reportMissingImports=false, reportPrivateUsage=false
# verl is not installed where types are checked.

from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry

from rolloutbus.trainer_adapter.frameworks.verl.options import NAME, FleetOptions
from rolloutbus.trainer_adapter.frameworks.verl.serving import FleetLoadBalancer, FleetReplica
from rolloutbus.trainer_adapter.frameworks.verl.weights import FleetCheckpointEngine, FleetRollout

__all__ = [
    "FleetCheckpointEngine",
    "FleetLoadBalancer",
    "FleetOptions",
    "FleetReplica",
    "FleetRollout",
]

RolloutReplicaRegistry.register(NAME, lambda: FleetReplica)
# verl has no function for it.
base._ROLLOUT_REGISTRY[NAME, "async"] = f"{FleetRollout.__module__}.{FleetRollout.__name__}"  # noqa: SLF001
