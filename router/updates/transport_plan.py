"""By which way each worker takes a new version: judged from where everybody is, with the reason.

Whether the way then leads there is the worker's to find out; it falls back to others by itself.
Spec: docs/protocol.md, "Transports".
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from rolloutbus.bus.wire.messages.membership import StoreFacts, WorkerFacts
from rolloutbus.bus.wire.messages.weights import Offer, PublishVersion, Transport

NEAREST_FIRST: tuple[tuple[Transport, str], ...] = (
    ("cuda_ipc", "the publisher's copy is on its GPU"),
    ("shm", "it shares memory with the store"),
    ("collective", "the publisher offers a group"),
    ("disk", "it can read the files of the version"),
    ("delta", "the store is on another host, and it has older weights"),
    ("tcp", "the store is on another host, and it has no older weights"),
)
"""What `auto` tries, and why it takes what it takes."""
DEAR = "their deltas are more than the version, which workers pass on"
FAN_OUT = 2
"""Workers that pull from one source: each link carries a version so often at most."""


class Target(NamedTuple):
    """A worker that is to take a version."""

    name: str
    facts: WorkerFacts
    has_base: bool = False
    """Its weights are whole, and the store knows them: a delta can be applied."""
    is_able: bool = True
    """It can begin at once: a group waits for each of its ranks."""


class Way(NamedTuple):
    """Transport and source that one worker uses; see `PrepareUpdate`."""

    transport: Transport
    why: str
    sources: tuple[str, ...] = ()
    rank: int = 0
    world: int = 0


def plan_ways(
    targets: Sequence[Target],
    store: StoreFacts,
    body: PublishVersion,
    holders: Sequence[WorkerFacts] = (),
    delta_share: float | None = None,
) -> dict[str, Way]:
    """A way for each target, by its name.

    Args:
        targets: who is to take it.
        store: where its bytes are.
        body: what the publisher asked for.
        holders: workers that have the version already.
        delta_share: bytes of a delta, by those of a version, as the policy's last one was; 1: the
            version was taken instead; None: no delta was asked for yet.
    """
    ways = {target.name: _way_of(target, store, body) for target in targets}
    ranked = [name for name, way in ways.items() if way.transport == "collective"]
    for rank, name in enumerate(ranked, start=1):
        ways[name] = ways[name]._replace(rank=rank, world=len(ranked) + 1)
    far = [
        target
        for target in targets
        if ways[target.name].transport in {"tcp", "delta"} and not _is_near(target.facts, store)
    ]
    tree = _tree(far, holders)
    if body.transport == "auto":
        ways |= dict.fromkeys(_dear_deltas(ways, tree, delta_share), Way("tcp", DEAR))
    for name, sources in tree.items():
        # With sources, a worker leaves a large delta alone.
        is_asked_for = body.transport == ways[name].transport == "delta"
        ways[name] = ways[name]._replace(sources=() if is_asked_for else sources)
    return ways


def _dear_deltas(
    ways: Mapping[str, Way], tree: Mapping[str, Sequence[str]], delta_share: float | None
) -> Sequence[str]:
    """Workers that should not take a delta: only the store has deltas, workers relay versions.

    The last of the tree is asked to take its delta still, so that its size is known the next time;
    a large one it leaves alone.
    """
    deltas = [name for name in tree if ways[name].transport == "delta"]
    n_whole = max(1, sum(not sources for sources in tree.values()))
    share = 1.0 if delta_share is None else delta_share
    return deltas[:-1] if len(deltas) * share > n_whole else []


def without_groups(body: PublishVersion, but_of: str = "") -> PublishVersion:
    """A group that was formed, or not, is never used again; nor is that of an earlier router.

    Ranks that two of them gave would wait for each other.
    """
    kept = {"", but_of} if but_of else set[str]()
    offers = [each for each in body.offers if each.transport != "collective" or each.router in kept]
    return body if len(offers) == len(body.offers) else replace(body, offers=offers)


def _way_of(target: Target, store: StoreFacts, body: PublishVersion) -> Way:
    if body.transport == "auto":
        for transport, why in NEAREST_FIRST[:-1]:
            if transport == "cuda_ipc" and not _is_on_its_gpu(target, body.offers):
                continue  # it would need memory of its own GPU for another copy
            if not _obstacle(transport, target, store, body.offers):
                return Way(transport, why)
        transport, why = NEAREST_FIRST[-1]
        if _is_near(target.facts, store):
            why = "it cannot take weights by shm"
        elif target.has_base:
            why = "the store is on another host, and it cannot take deltas"
        return Way(transport, why)
    obstacle = _obstacle(body.transport, target, store, body.offers)
    if obstacle:
        is_far = _obstacle("shm", target, store, ())
        return Way("tcp" if is_far else "shm", f"{body.transport}: {obstacle}")
    return Way(body.transport, "the publisher asked for it")


def _obstacle(
    transport: Transport, target: Target, store: StoreFacts, offers: Sequence[Offer]
) -> str:
    """Why this worker cannot take it that way; empty if it can."""
    if transport == "tcp":
        return ""
    if transport not in target.facts.transports:
        return "this worker cannot take weights that way"
    if transport == "shm":
        return "" if _is_near(target.facts, store) else "the store is on another host"
    if transport == "delta":
        return "" if target.has_base else "it has no weights that a delta could be applied to"
    if transport == "disk" and store.has_files:
        return ""
    obstacle = "the publisher does not offer it, or not to this router any more"
    for offer in offers:
        if offer.transport == transport:
            obstacle = _obstacle_to_offer(offer, target)
            if not obstacle:
                break
    return obstacle


def _obstacle_to_offer(offer: Offer, target: Target) -> str:
    facts = target.facts
    if offer.host not in {"", facts.host}:
        return "it is offered on another host"
    if offer.transport == "collective":
        if not target.is_able:
            return "it cannot begin now, and a group waits for nobody"
        is_fit = offer.backend != "nccl" or len(facts.gpus) == 1
        return "" if is_fit else "nccl needs an engine on one GPU"
    if offer.transport == "cuda_ipc" and not facts.gpus:
        return "it has no GPU"
    return ""


def _is_on_its_gpu(target: Target, offers: Sequence[Offer]) -> bool:
    return any(each.transport == "cuda_ipc" and each.at in target.facts.gpus for each in offers)


def _is_near(facts: WorkerFacts, store: StoreFacts) -> bool:
    """Whether it can share memory with the store."""
    return facts.host != "" and facts.host == store.host


def _tree(far: Sequence[Target], holders: Sequence[WorkerFacts]) -> dict[str, tuple[str, ...]]:
    """Whom to ask before the store; each asks its parent, which begins to serve while it pulls.

    Workers that serve nobody become leaves.
    """
    held = [facts.bulk for facts in holders if facts.bulk]
    ordered = sorted(far, key=lambda target: not target.facts.bulk)
    sources: dict[str, tuple[str, ...]] = {}
    for index, target in enumerate(ordered):
        parent = ordered[(index - 1) // FAN_OUT].facts.bulk if index else ""
        asked = [parent] if parent else held[:FAN_OUT]
        sources[target.name] = tuple(bulk for bulk in asked if bulk != target.facts.bulk)
    return sources
