"""What happened to a fleet between two answers of its router, in sentences. Pure.

What came and went between two questions is not seen; the router's counters tell how often it did.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from rolloutbus.bus.wire.counters import ROUTER_COUNTERS
from rolloutbus.bus.wire.messages.control import FleetStatus, WorkerStatus
from rolloutbus.bus.wire.messages.weights import UpdateStatus

Level = Literal["change", "warning", "fault"]

FAULTS = (
    "adapters_refused",
    "bad_requests",
    "breaker_opened",
    "busy_refused",
    "dead_letters_dropped",
    "detached_uncollected",
    "expired_leases",
    "fenced",
    "forbidden",
    "foreign_members",
    "lost",
    "malformed",
    "offenders_dismissed",
    "own_pauses",
    "poisoned",
    "rejected",
    "resource_alarms",
    "sessions_expired",
    "sessions_refused",
    "shunned",
    "silent_members",
    "strangers",
    "tap_dropped",
    "turned_away",
    "undelivered",
)
"""Names of the router's counters that count what should not happen."""


class FleetEvent(msgspec.Struct, frozen=True):
    """One thing that happened."""

    level: Level
    who: str
    """A worker, a policy, `router`, `store` or `fleet`."""
    what: str
    """A sentence without its subject."""


NOT_WRITTEN = (
    "could not write the last version to its directory: a fleet that begins there would begin with "
    "an earlier one; the store's log says why"
)


def unwritten_versions(status: FleetStatus) -> int:
    """Versions that are served and that the store could not write to its directory."""
    return 0 if status.store is None else int(status.store.gauges.get("unwritten_versions", 0))


def faults_of(status: FleetStatus) -> dict[str, int]:
    """The router's counters of faults that are not 0."""
    return {name: n for name in FAULTS if (n := status.counters.get(name, 0))}


def events_between(before: FleetStatus, now: FleetStatus) -> list[FleetEvent]:
    """What changed; of another router's counters nothing is told."""
    return [
        *_of_router(before, now),
        *_of_workers(before, now),
        *_of_weights(before, now),
        *_counted(before, now),
    ]


def _of_router(before: FleetStatus, now: FleetStatus) -> Iterator[FleetEvent]:
    if now.instance != before.instance:
        yield FleetEvent("fault", "router", f"is another process now, of epoch {now.router_epoch}")
    if now.recovering and not before.recovering:
        yield FleetEvent("warning", "router", "learns from the workers what runs")
    if before.recovering and not now.recovering:
        yield FleetEvent("change", "router", "knows again what runs")
    if now.pause != before.pause:
        what = f"is to be paused: {now.pause}" if now.pause else "goes on after its pause"
        yield FleetEvent("warning" if now.pause else "change", "fleet", what)
    if before.store is None and now.store is not None:
        yield FleetEvent("change", "store", "is connected")
    if before.store is not None and now.store is None:
        yield FleetEvent("fault", "store", "is not connected any more")
    if unwritten_versions(now) > unwritten_versions(before):
        yield FleetEvent("fault", "store", NOT_WRITTEN)


def _of_workers(before: FleetStatus, now: FleetStatus) -> Iterator[FleetEvent]:
    were = {each.name: each for each in before.workers}
    here = {each.name: each for each in now.workers}
    for name in were.keys() - here.keys():
        why = now.absent.get(name) or now.troubled.get(name)
        yield FleetEvent("fault" if why else "warning", name, f"is gone: {why}" if why else "left")
    for name, worker in here.items():
        if name in were:
            yield from _of_worker(were[name], worker)
        else:
            yield FleetEvent("change", name, f"joined with v{worker.version}")
    for name, why in now.troubled.items():
        if before.troubled.get(name) != why:
            yield FleetEvent("fault", name, f"fails too much: {why}")


def _of_worker(was: WorkerStatus, now: WorkerStatus) -> Iterator[FleetEvent]:
    name = now.name
    if was.epoch.partition(".")[0] != now.epoch.partition(".")[0]:
        yield FleetEvent("fault", name, "is another process now")
    elif was.epoch != now.epoch:
        yield FleetEvent("warning", name, "has a new lease")
    if was.version != now.version:
        yield FleetEvent("change", name, f"samples with v{now.version} after v{was.version}")
    if was.state != now.state:
        yield FleetEvent("change", name, f"is {now.state} after {was.state}")
    for reason, sentence in now.blocked_by.items():
        if reason not in was.blocked_by:
            yield FleetEvent("warning", name, f"gets no requests, {reason}: {sentence}")
    if was.blocked_by and not now.blocked_by:
        yield FleetEvent("change", name, "gets requests again")
    if now.problem and now.problem != was.problem:
        yield FleetEvent("fault", name, f"missed an update: {now.problem}")


def _of_weights(before: FleetStatus, now: FleetStatus) -> Iterator[FleetEvent]:
    were, under_way = _by_key(before), _by_key(now)
    for key, update in under_way.items():
        was = were.get(key)
        of_one = " for a worker that is behind" if update.is_catch_up else ""
        if was is None:
            what = f"v{update.version} is {update.phase}{of_one}, {update.n_targets} to have it"
            yield FleetEvent("change", update.policy, what)
        elif was.phase != update.phase:
            what = f"v{update.version} is {update.phase}{of_one} after {was.phase}"
            yield FleetEvent("change", update.policy, what)
    for policy, version in now.committed.items():
        if before.committed.get(policy) != version:
            yield FleetEvent("change", policy, f"v{version} is committed")
    for key, was in were.items():
        if key not in under_way and not was.is_catch_up:
            is_in_force = now.committed.get(was.policy, -1) >= was.version
            if not is_in_force:
                yield FleetEvent("fault", was.policy, f"v{was.version} was given up in {was.phase}")


def _by_key(status: FleetStatus) -> Mapping[tuple[str, int, bool], UpdateStatus]:
    return {(each.policy, each.version, each.is_catch_up): each for each in status.updates}


def _counted(before: FleetStatus, now: FleetStatus) -> Iterator[FleetEvent]:
    if now.instance != before.instance:
        return
    n_moved = now.counters.get("places_moved", 0) - before.counters.get("places_moved", 0)
    if n_moved > 0:
        yield FleetEvent("change", "router", f"moved {n_moved} sessions to another worker")
    for name in FAULTS:
        n = now.counters.get(name, 0) - before.counters.get(name, 0)
        if n > 0:
            yield FleetEvent("fault", "router", f"{name} +{n}: {ROUTER_COUNTERS[name]}")
