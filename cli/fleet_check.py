"""Whether all planes of a running fleet can be reached from here, and whether clocks agree."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from rolloutbus.bus.transport.endpoints import is_local, router_addresses, without_keys
from rolloutbus.bus.wire.errors import BusError
from rolloutbus.bus.wire.messages.control import ServerFacts
from rolloutbus.cli.terminal import Unreachable, connected
from rolloutbus.engine_worker.engines.survey.machine import Finding, State
from rolloutbus.trainer_adapter.client.client import RolloutClient

REACH_S = 2.0
ASK_S = 5.0
LARGEST_OFFSET_S = 0.5
"""Clocks that differ by more put journals, logs and traces of their hosts into a wrong order."""
SECTION = "fleet"


class Reach(NamedTuple):
    """Whether an endpoint takes connections."""

    state: State
    says: str


async def fleet_findings(address: str, key_file: str) -> list[Finding]:
    """Look at the router, each worker's streams and clock, and the weight store.

    Raises:
        SettingsError: the address or the key cannot be used.
    """
    try:
        async with connected(address, key_file) as client:
            return [each async for each in _look(client)]
    except Unreachable as error:
        says = f"{error}; no other plane can be looked at"
        return [Finding(SECTION, "router", "failed", says)]


async def _look(client: RolloutClient) -> AsyncIterator[Finding]:
    began_at = time.monotonic()
    status = await client.status(deadline_s=ASK_S)
    spent_ms = 1e3 * (time.monotonic() - began_at)
    router = client.connection.address.partition("#")[0]
    says = f"{router} answers in {spent_ms:.1f} ms; {len(status.workers)} workers"
    yield Finding(SECTION, "router", "ok", says)
    for other in router_addresses(without_keys(client.connection.settings.router)):
        if other != router:
            found = await reach(other, router, "--frontend")
            yield Finding(SECTION, "other router", found.state, found.says)
    members = sorted(client.connection.members, key=lambda each: (len(each.name), each.name))
    places = [(f"streams of {each.name}", each.stream, "--stream") for each in members]
    bulk = client.connection.upstream.bulk
    if bulk:
        places.append(("bulk of the store", bulk, "--bulk"))
    found = await asyncio.gather(
        *(reach(endpoint, router, option) for _, endpoint, option in places)
    )
    for (name, _, _), each in zip(places, found, strict=True):
        yield Finding(SECTION, name, each.state, each.says)
    if not members:
        yield Finding(SECTION, "workers", "missing", "none is here: start one, and look again")
    if not bulk:
        says = "none is connected: weights cannot be published (`rolloutbus store`)"
        yield Finding(SECTION, "store", "missing", says)
    for name in [each.name for each in members]:
        yield await _clock(client, name)


async def reach(endpoint: str, router: str, option: str) -> Reach:
    """Whether connections to an endpoint can be made from here.

    Args:
        endpoint: that its actor advertises.
        router: where the router was reached.
        option: of the actor, which sets the endpoint.
    """
    place = endpoint.partition("#")[0]
    scheme, _, where = place.partition("://")
    try:
        if is_local(place) and not is_local(router):
            says = f"{place} is reached from its own host only: start it with {option} tcp://HOST:0"
            return Reach("failed", f"{says}, an address that this host can reach, and keys")
        async with asyncio.timeout(REACH_S):
            if scheme == "ipc":
                _, writer = await asyncio.open_unix_connection(where)
            else:
                host, _, port = where.rpartition(":")
                _, writer = await asyncio.open_connection(host.strip("[]"), port)
        writer.close()
    except TimeoutError:
        says = f"{place} gives no answer in {REACH_S:g} s: a firewall, or another network's address"
        return Reach("failed", f"{says}; open the port, or start it with another {option}")
    except (OSError, ValueError, BusError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return Reach("failed", f"{place}: {why}; is its process alive, and is it this host's way?")
    return Reach("ok", f"{place} takes connections")


async def _clock(client: RolloutClient, worker: str) -> Finding:
    name = f"clock of {worker}"
    before, began_at = time.time(), time.monotonic()
    try:
        result = await client.server_info(target=worker, deadline_s=ASK_S)
    except BusError as error:
        return Finding(SECTION, name, "note", f"not asked: {error}")
    spent_s = time.monotonic() - began_at
    facts = result.by_worker.get(worker)
    if not isinstance(facts, ServerFacts) or not facts.clock_ms:
        return Finding(SECTION, name, "note", "the worker does not tell it")
    offset_s = facts.clock_ms / 1e3 - (before + spent_s / 2)
    return Finding(SECTION, name, *judged(offset_s, spent_s / 2))


def judged(offset_s: float, error_s: float) -> Reach:
    """What an offset means.

    Args:
        offset_s: seconds by which the other clock is ahead.
        error_s: how well that is known.
    """
    side = "ahead of" if offset_s > 0 else "behind"
    says = f"{abs(offset_s):.3f} s {side} this host's, give or take {error_s:.3f} s"
    if abs(offset_s) <= LARGEST_OFFSET_S + error_s:
        return Reach("ok", says)
    advice = "journals, logs and traces do not line up: run chrony or ntpd on both hosts"
    return Reach("note", f"{says}; {advice}")
