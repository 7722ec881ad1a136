"""What a publication is asked for, and what comes of it."""

import math
import re
from dataclasses import dataclass, field
from typing import Annotated, TypedDict

from rolloutbus.bus.strict_calls import Spelled
from rolloutbus.bus.wire.errors import BusError, Refused
from rolloutbus.bus.wire.messages.endings import bad_request
from rolloutbus.bus.wire.messages.weights import (
    InFlight,
    PublishVersion,
    TransportChoice,
    UpdateMode,
)
from rolloutbus.bus.wire.messages.weights import VersionPublished as PublishedByRouter

UPDATE_DEADLINE_S = 120.0
_RULE = re.compile(r"all|quorum|any|at-least:[1-9][0-9]{0,8}")


Requirement = Annotated[str, Spelled(_RULE, "all, quorum, any or at-least:N")]


class RestoreOptions(TypedDict, total=False):
    """All keyword parameters of `WeightPublisher.restore`, to hand them on as one."""

    in_flight: InFlight
    require: Requirement
    transport: TransportChoice
    mode: UpdateMode
    floor: int
    deadline_s: float


class PublishOptions(RestoreOptions, total=False):
    """Those of `WeightPublisher.publish`."""

    allow_zeros: bool


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is committed: new requests are served with it."""

    version: int
    stall_ms: dict[str, float]
    """Worker -> how long it could not generate because of the swap; active workers only."""
    quarantined: dict[str, str]
    """Worker -> why it is not active; it gets no requests until it has caught up."""
    write_s: float
    """Copying the tensors into the store and verifying them, seconds."""
    update_s: float
    """Bringing them to the workers, from sealed to committed, seconds."""
    transport: dict[str, str] = field(default_factory=dict[str, str])
    """Worker -> by which way it got the bytes; active workers only."""
    why: dict[str, str] = field(default_factory=dict[str, str])
    """Worker -> why that way, where the router said so."""
    moved_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Worker -> bytes that crossed a link for it."""


@dataclass(frozen=True, slots=True)
class PublishedLora:
    """An adapter that requests may name from now on."""

    name: str
    version: int
    """`lora=NAME` gets the latest, `lora=NAME@VERSION` this one."""
    workers: tuple[str, ...]
    """Those that have it."""
    problems: dict[str, BusError] = field(default_factory=dict[str, BusError])
    """Worker -> why it has not."""


def publish_command(policy: str, version: int, options: PublishOptions) -> PublishVersion:
    """The router's command.

    Raises:
        Refused: `require`, `floor` or `deadline_s` is no valid value; `.field` names it.
    """
    require, floor = options.get("require", "any"), options.get("floor", 0)
    deadline_s = options.get("deadline_s", UPDATE_DEADLINE_S)
    if _RULE.fullmatch(require) is None:
        message = f"{require!r} is not one of all, quorum, any, at-least:N"
        raise Refused(bad_request("require", message))
    if floor < 0:
        raise Refused(bad_request("floor", f"a number of workers is not below 0: {floor}"))
    if not 0 < deadline_s < math.inf:
        message = f"a deadline is a number of seconds above 0, not {deadline_s}"
        raise Refused(bad_request("deadline_s", message))
    return PublishVersion(
        policy=policy,
        version=version,
        in_flight=options.get("in_flight", "keep"),
        require=require,
        transport=options.get("transport", "auto"),
        mode=options.get("mode", "staged"),
        floor=floor,
    )


def published_of(result: PublishedByRouter, write_s: float, update_s: float) -> Published:
    """The caller's view of the router's answer."""
    active = [each for each in result.workers if each.is_active]
    return Published(
        version=result.version,
        stall_ms={each.worker: each.stall_ms for each in active},
        quarantined={each.worker: each.problem for each in result.workers if not each.is_active},
        write_s=write_s,
        update_s=update_s,
        transport={each.worker: each.transport for each in active},
        why={each.worker: each.why for each in result.workers if each.why},
        moved_bytes={each.worker: each.moved_bytes for each in active},
    )
