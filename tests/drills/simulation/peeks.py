"""What the simulator reads inside of the shipped cores; the product does not show it."""

# pyright: reportPrivateUsage=false
# Oracles must not trust what the judged code says about itself.

from collections.abc import Collection

from rolloutbus.bus.membership.core import MemberCore
from rolloutbus.bus.membership.lease import HOLDING
from rolloutbus.engine_worker.worker.core import WorkerCore
from rolloutbus.router.core import RouterCore
from rolloutbus.router.requests.record import SessionRecord
from rolloutbus.trainer_adapter.client.core.core import ClientCore


def holds_lease(member: MemberCore, now: float) -> bool:
    """Whether it may act at this moment."""
    return member.state in HOLDING and member._holder._until > now


def router_of(member: MemberCore) -> str:
    """Instance of the router that it obeys."""
    return member._holder.instance


def router_epoch_of(member: MemberCore) -> int:
    """Epoch at which it obeys that router."""
    return member._holder.router_epoch


def version_of(worker: WorkerCore) -> int:
    """Weights that its engine has active."""
    return worker._controller.version


def is_updating(worker: WorkerCore) -> bool:
    """Whether its engine may be swapping weights at this moment."""
    return worker._controller.state.is_updating


def is_busy(worker: WorkerCore) -> bool:
    """Whether its engine works on any request."""
    return bool(worker._generation._requests)


def sessions_of(router: RouterCore) -> Collection[SessionRecord]:
    """Those that are open."""
    return router._sessions._sessions.values()


def is_idle_member(member: MemberCore, now: float) -> bool:
    """Whether a tick at this moment would change nothing but its own date."""
    return (
        now < member._heartbeat_at  # mostly not
        and member._state == "leased"
        and now < member._holder._until
        and not member.deliveries.outbox.size_bytes
    )


def rest_s(member: MemberCore, now: float) -> float:
    """How long nothing is due at a member that has nothing to do."""
    return member._heartbeat_at - now if member._state == "leased" else 0.0


def is_idle_client(client: ClientCore, now: float) -> bool:
    """Whether a tick at this moment would change nothing but its own date."""
    link, book = client._link, client._book
    return (
        now < link._heartbeat_at
        and link.state == "up"
        and now - link._heard_at <= link._settings.silence_s
        and book.acks.is_empty
        and (not book._due._heap or now < book._due._heap[0][0])
    )


def has_rejected(client: ClientCore) -> bool:
    """Whether its connection leads to a second router, which it does not obey."""
    return client._link.has_rejected
