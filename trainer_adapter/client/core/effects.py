"""What the client's core asks of its shell, besides the effects that all cores share."""

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from rolloutbus.bus.actor.effects import Connect, Send
from rolloutbus.bus.wire.errors import BusError
from rolloutbus.bus.wire.messages.weights import UpdateProgress
from rolloutbus.trainer_adapter.client.rollout import Delta, FleetResult, Rollout

Result = Rollout | FleetResult | msgspec.Struct
"""What a caller gets: of a generate, of a command to members, of one to the router."""

Outcome = Result | BusError
"""How a request ended for its caller: a result to return or an error to raise."""


class Deliver(NamedTuple):
    """Hand the next delta to whoever reads this request's stream."""

    rid: str
    delta: Delta


class Report(NamedTuple):
    """Tell whoever publishes by this request how far the update has come."""

    rid: str
    progress: UpdateProgress


class Complete(NamedTuple):
    """The request has ended; nothing more comes for it."""

    rid: str
    outcome: Outcome


class Subscribe(NamedTuple):
    """Listen to this worker's stream for the client's topic."""

    endpoint: str


class Unsubscribe(NamedTuple):
    """Stop listening to it."""

    endpoint: str


class Welcomed(NamedTuple):
    """The router answered a hello: requests flow."""

    router_epoch: int


class FleetChanged(NamedTuple):
    """Another fleet answers at the router's address than before."""

    former: str
    fleet: str


class PolicyUnserved(NamedTuple):
    """A request names a policy that no worker is known to have had; said once of each name."""

    policy: str
    served: list[str]
    """Policies of the workers that are here, at least one."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The router will never serve this client again; every request has been completed."""

    error: BusError


Effect = (
    Connect
    | Send
    | Deliver
    | Report
    | Complete
    | Subscribe
    | Unsubscribe
    | Welcomed
    | Stopped
    | FleetChanged
    | PolicyUnserved
)
