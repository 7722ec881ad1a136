"""What the gateway says of weights that it published, and of what it lacks to publish any."""

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.gateway.exchange import Json

if TYPE_CHECKING:
    from rolloutbus.trainer_adapter.publisher.transfer import Published

T = TypeVar("T")


def with_torch(made: Callable[[], T]) -> T:
    """Returns what `made` makes, which imports torch.

    Raises:
        Refused: it is not installed here.
    """
    try:
        return made()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rolloutbus"):
            raise
        message = f"to publish weights this gateway needs the package {error.name}: install it"
        raise Refused(Problem("unsupported", message, "not_started")) from error


def reply_of_published(published: "Published") -> tuple[Json, HTTPStatus]:
    """Body and status; a worker that has not swapped is named, and gets no requests until then."""
    version = published.version
    told: Json = {"version": version, "workers": sorted(published.stall_ms)}
    if not published.quarantined:
        message = f"version {version} is active on {len(published.stall_ms)} workers"
        return {"success": True, "message": message, **told}, HTTPStatus.OK
    reasons = "; ".join(f"{name}: {why}" for name, why in published.quarantined.items())
    message = (
        f"version {version} is committed, but these workers do not have it yet, and get no "
        f"requests until they do: {reasons}"
    )
    told["quarantined"] = published.quarantined
    return {"success": False, "message": message, **told}, HTTPStatus.INTERNAL_SERVER_ERROR
