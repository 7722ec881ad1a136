"""Forgetting every cached prefix, also those of requests that run."""

from typing import TYPE_CHECKING

from rolloutbus.trainer_adapter.client.rollout import FleetResult

if TYPE_CHECKING:
    from rolloutbus.trainer_adapter.client.control import FleetClient


async def reset_with_what_runs(
    client: "FleetClient", target: str, deadline_s: float
) -> FleetResult:
    """Stop what runs, flush, and go on; see `FleetClient.reset_prefix_cache`.

    Workers that were paused before stay paused, whatever happens. A worker's result is what went
    wrong first: it may have flushed and still be paused.
    """
    before = await client.status(deadline_s=deadline_s)
    held = {each.name for each in before.workers if each.state == "paused"}
    paused = await client.pause("abort", target=target, deadline_s=deadline_s, check=False)
    results = [paused]
    try:
        results.append(await client.flush_cache(target=target, deadline_s=deadline_s, check=False))
    finally:
        for name in {*paused.by_worker, *paused.silent} - held if held else [target]:
            resumed = await client.resume(target=name, deadline_s=deadline_s, check=False)
            results.append(resumed)
    return _all_of(results)


def _all_of(results: list[FleetResult]) -> FleetResult:
    """The flush's results, and instead of them the first errors of any step."""
    by_worker = dict(results[1].by_worker)
    silent: dict[str, None] = {}
    for result in reversed(results):
        by_worker.update(result.errors)
        silent.update(dict.fromkeys(result.silent))
    return FleetResult(
        {name: each for name, each in by_worker.items() if name not in silent}, list(silent)
    )
