"""What the client's core asks of its shell, besides the effects that all cores share."""

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from rolloutbus.bus.actor.effects import Connect, Send
from rolloutbus.bus.wire.errors import BusError
from rolloutbus.bus.wire.messages.weights import UpdateProgress
from rolloutbus.trainer_adapter.client.core.results import Delta, FleetResult, Rollout


@dataclass(slots=True)
class ClientCounters:
    """Since the client started."""

    finished: int = 0
    """Requests and commands that ended without an error."""
    prompt_tokens: int = 0
    """Tokens of the prompts of results that came."""
    tokens: int = 0
    """Sampled tokens of results that came."""
    resends: int = 0
    """Commands sent again because the client got no answer to them."""
    reconnects: int = 0
    lost: int = 0
    """Executions that were declared lost."""
    resumed: int = 0
    """Requests sent again with the tokens that were held."""
    retried: int = 0
    """Requests sent again from the start."""
    deferred: int = 0
    """Requests sent again because no worker was ready for them."""
    stale_endings: int = 0
    """Endings of requests or attempts that had already ended here; acknowledged and dropped."""
    stale_deltas: int = 0
    duplicates: int = 0
    """Stream rows that brought nothing new."""
    gaps: int = 0
    repairs: int = 0
    """Repair commands sent."""
    stream_mismatches: int = 0
    """Requests whose streamed tokens were not those of the result."""
    digest_mismatches: int = 0
    sessions_moved: int = 0
    """Times that an open session changed its worker."""
    sessions_lost: int = 0
    """Sessions whose place was gone when this client connected again."""
    malformed_in: int = 0
    """Entries whose body broke its type."""
    unexpected_in: int = 0
    """Entries that a client is never sent."""
    fleets_changed: int = 0
    """Another fleet answered at the router's address."""
    held_back: int = 0
    """Requests that waited until the router had named its fleet."""


Result = Rollout | FleetResult | msgspec.Struct
"""What a caller gets: of a generate, of a command to members, of one to the router."""

Outcome = Result | BusError
"""How a request ended for its caller: a result to return or an error to raise."""


class Deliver(NamedTuple):
    """Hand the next delta to the reader of this request's stream."""

    rid: str
    delta: Delta


class Report(NamedTuple):
    """Report the progress of an update to the publisher that waits for it."""

    rid: str
    progress: UpdateProgress


class Complete(NamedTuple):
    """A request has ended; no more effects follow for it."""

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
