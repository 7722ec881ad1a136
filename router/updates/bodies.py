"""What each worker is told to prepare: its own way to the bytes of one version."""

from collections.abc import Iterable, Iterator

from msgspec import Raw

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.limits import MAX_POLICIES
from rolloutbus.bus.wire.messages.membership import StoreFacts
from rolloutbus.bus.wire.messages.weights import Prepared, PrepareUpdate
from rolloutbus.router.context import Context
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.updates.record import UpdateRecord
from rolloutbus.router.updates.store_record import store_facts
from rolloutbus.router.updates.transport_plan import DELTA_SHARE, Target, Way, plan_ways

TAKES_UPDATES = frozenset({"ready", "paused", "updating", "torn"})
"""Heartbeat states in which a worker can begin an update."""


def prepare_bodies(
    context: Context, update: UpdateRecord, targets: Iterable[MemberRecord]
) -> dict[str, Raw]:
    """By name; the ways are noted in the update."""
    body = update.body
    store = store_facts(context) or StoreFacts("")
    update.bulk = store.bulk
    holders = [
        facts
        for member in context.members.workers(body.policy)
        if member.version == body.version and (facts := member.hello.worker) is not None
    ]
    share = context.delta_shares.get(body.policy, DELTA_SHARE)
    ways = plan_ways([*_as_targets(targets)], store, body, holders, share)
    update.ways.update(ways)
    return {
        name: pack(
            PrepareUpdate(
                policy=body.policy,
                version=body.version,
                bulk=store.bulk,
                transport=way.transport,
                sources=list(way.sources),
                mode=body.mode,
                rank=way.rank,
                world=way.world,
            )
        )
        for name, way in ways.items()
    }


def note_delta(context: Context, policy: str, way: Way | None, prepared: Prepared) -> None:
    """What a delta has cost is what the next one is expected to."""
    shares = context.delta_shares
    is_told = way is not None and way.transport == "delta" and prepared.transport
    has_room = policy in shares or len(shares) < MAX_POLICIES
    if is_told and has_room and prepared.size_bytes:
        shares[policy] = prepared.moved_bytes / prepared.size_bytes


def _as_targets(members: Iterable[MemberRecord]) -> Iterator[Target]:
    for member in members:
        facts, state = member.hello.worker, member.heartbeat.state
        if facts is not None:
            has_base = member.version > 0 and state != "torn"
            yield Target(member.name, facts, has_base, is_able=state in TAKES_UPDATES)
