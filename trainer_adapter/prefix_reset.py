"""Forgetting every cached prefix, also those of requests that run."""

from typing import TYPE_CHECKING

from trainer_adapter.rollout import FleetResult

if TYPE_CHECKING:
    from trainer_adapter.control import FleetClient


async def reset_with_what_runs(
    client: "FleetClient", target: str, deadline_s: float
) -> FleetResult:
    """Stop what runs, flush, and go on; see `FleetClient.reset_prefix_cache`.

    Workers that were paused before stay paused, whatever happens.
    """
    before = await client.status(deadline_s=deadline_s)
    held = {each.name for each in before.workers if each.state == "paused"}
    paused = await client.pause("abort", target=target, deadline_s=deadline_s)
    try:
        flushed = await client.flush_cache(target=target, deadline_s=deadline_s)
    finally:
        for name in paused.by_worker.keys() - held if held else [target]:
            await client.resume(target=name, deadline_s=deadline_s)
    return flushed
