"""Engine routes, by SGLang's names, as commands to one worker or to the fleet."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from fastapi import Request

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.near_names import nearest
from rolloutbus.gateway.exchange import Json
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import FleetResult

PAUSE_MODES = ("abort", "retract", "in_place")
MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
SLOW_S = 120.0
"""Deadline of commands that wait for running requests or move memory."""

EngineRoute = Callable[[RolloutClient, Json, str], Awaitable[FleetResult]]
"""Given a client, the body and the target, sends a command; errors stand in the result."""


async def pause_generation(client: RolloutClient, body: Json, target: str) -> FleetResult:
    """Workers sample nothing until `continue_generation`."""
    check_fields(body, ("mode",))
    mode = body.get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise Refused(bad_request("mode", f"a mode is one of {', '.join(PAUSE_MODES)}"))
    return await client.pause(mode, target=target, deadline_s=SLOW_S, check=False)


async def continue_generation(client: RolloutClient, body: Json, target: str) -> FleetResult:
    """Ends the pause."""
    check_fields(body, ("torch_empty_cache",))
    return await client.resume(target=target, deadline_s=SLOW_S, check=False)


async def flush_cache(client: RolloutClient, body: Json, target: str) -> FleetResult:
    """Workers forget cached prefixes that no request uses."""
    check_fields(body, ())
    return await client.flush_cache(target=target, deadline_s=SLOW_S, check=False)


async def release_memory(client: RolloutClient, body: Json, target: str) -> FleetResult:
    """Workers release engine memory; they must be idle."""
    return await client.sleep(_tags(body), target=target, deadline_s=SLOW_S, check=False)


async def resume_memory(client: RolloutClient, body: Json, target: str) -> FleetResult:
    """Workers take released memory back."""
    return await client.wake_up(_tags(body), target=target, deadline_s=SLOW_S, check=False)


async def server_info(client: RolloutClient, body: Json, target: str) -> FleetResult:
    """Facts and counters of engines."""
    check_fields(body, ())
    return await client.server_info(target=target, check=False)


async def get_load(client: RolloutClient, body: Json, target: str) -> FleetResult:
    """Gauges of engines."""
    check_fields(body, ())
    return await client.get_load(target=target, check=False)


ENGINE_ROUTES: Mapping[str, EngineRoute] = {
    "pause_generation": pause_generation,
    "continue_generation": continue_generation,
    "flush_cache": flush_cache,
    "release_memory_occupation": release_memory,
    "resume_memory_occupation": resume_memory,
    "server_info": server_info,
    "get_server_info": server_info,
    "get_load": get_load,
}


READS = frozenset({"server_info", "get_server_info", "get_load"})
"""Those that change nothing, so that a GET may ask for them."""


def engine_route(path: str) -> EngineRoute:
    """Look up a route by its path without slashes.

    Raises:
        Refused: `unsupported`: there is none.
    """
    found = ENGINE_ROUTES.get(path)
    if found is None:
        near = nearest(path, ENGINE_ROUTES)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(ENGINE_ROUTES)}"
        message = f"there is no engine route {path[:64]!r} for single workers; {hint}"
        raise Refused(Problem("unsupported", message, "not_started", field="path"))
    return found


def check_fields(body: Json, known: tuple[str, ...]) -> None:
    """Refuse a body that has a field which is not known.

    Raises:
        Refused: `.field` names it.
    """
    for name in body:
        if name not in known:
            there = f"there are {', '.join(known)}" if known else "send none"
            message = f"there is no field {name[:64]!r} here; {there}"
            raise Refused(bad_request(name[:64], message))


def check_query(request: Request, *known: str) -> None:
    """Refuse a request with a query parameter that is not known.

    Raises:
        Refused: `.field` names it.
    """
    for name in request.query_params:
        if name not in known:
            there = f"there are {', '.join(known)}" if known else "send none"
            message = f"there is no parameter {name[:64]!r} in the address; {there}"
            raise Refused(bad_request(name[:64], message))


def _tags(body: Json) -> list[Any]:
    check_fields(body, ("tags",))
    tags = body.get("tags")
    if tags is None:
        return ["weights", "kv_cache"]
    if not isinstance(tags, list) or not set(cast("list[Any]", tags)) <= set(MEMORY_TAGS):
        raise Refused(bad_request("tags", f"tags are a list of {', '.join(MEMORY_TAGS)}"))
    return cast("list[Any]", tags)
