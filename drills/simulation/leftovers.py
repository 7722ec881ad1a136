"""What must be empty when everybody has been answered: nothing leaks."""

# pyright: reportPrivateUsage=false
# It looks inside on purpose: a leak is exactly what no public number shows.

from collections.abc import Iterator
from typing import TYPE_CHECKING

from drills.simulation.nodes import RouterNode, WorkerNode
from drills.simulation.sim_client import ClientNode

if TYPE_CHECKING:
    from drills.simulation.world import World


def leftovers(world: "World") -> Iterator[str]:
    """What is left, one line each."""
    yield from _of_router(world.router)
    for worker in world.workers.values():
        yield from _of_worker(worker)
    for client in world.clients.values():
        yield from _of_client(client)


def _of_router(router: RouterNode) -> Iterator[str]:
    core = router.core
    sizes = {
        "requests": len(core.table),
        "waiting requests": len(core.table.waiting),
        "sent requests": len(core.table.sent),
        "member commands": len(core._fleet),
        "shares of member commands": len(core._fleet._parts),
        "updates": len(core._updates._current),
    }
    yield from (f"router: {size} {what}" for what, size in sizes.items() if size)
    for member in core.context.members:
        if member.requests or member.outstanding_cost or member.commands:
            held = f"{len(member.requests)} requests, cost {member.outstanding_cost}"
            yield f"router: {member.name} is charged with {held}"


def _of_worker(worker: WorkerNode) -> Iterator[str]:
    core = worker.core
    sizes = {
        "running commands": len(core.member.deliveries.running_list()),
        "endings in the outbox": len(core.member.deliveries.outbox),
        "running generations": len(core._generation),
        "pinned generations": core._generation.n_pinned,
    }
    yield from (f"{worker.name}: {size} {what}" for what, size in sizes.items() if size)


def _of_client(client: ClientNode) -> Iterator[str]:
    book = client.core._book
    sizes = {
        "open requests": client.core.n_open,
        "duties": len(book._due),
        "continuations": len(book._then),
        "repairs": len(client.core._streams._under_repair),
    }
    yield from (f"{client.name}: {size} {what}" for what, size in sizes.items() if size)
