"""What goes wrong in a run: one function per kind of fault."""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from tests.drills.simulation.routers import RouterPair
from tests.drills.simulation.weather import EVERYBODY

if TYPE_CHECKING:
    from tests.drills.simulation.world import World

AFTERMATH_S = 4.0
"""Leases and links need this long to recover from a fault that is over."""
ROUTER_AFTERMATH_S = 9.0
"""A back-off that grew while the router was away, and a lease that began behind it."""
SHORT_FREEZE_S = 1.0
"""A router that is frozen for less costs nobody a lease."""
LATEST_S = 8.0
"""The longest faults end so long after no more of them begin."""
SPLIT_S = 3.0
"""A router that is to go stays at most this long beside a second one; the second one thrice."""

Fault = Callable[["World", Random], None]


def kill_worker(world: "World", chance: Random, name: str = "") -> None:
    """Kill -9; the supervisor starts it again."""
    name = name or chance.choice(sorted(world.workers))
    world.note(f"kill {name}")
    world.health.touch(name, AFTERMATH_S)
    world.workers[name].kill()
    world.later(chance.uniform(0.2, 4), lambda: world.revive_worker(name))


def freeze_worker(world: "World", chance: Random) -> None:
    """SIGSTOP and SIGCONT, of the worker alone or together with its engine host."""
    name = chance.choice(sorted(world.workers))
    for_s = chance.choice([0.5, 1.5, 2.2, 4.0, 8.0])
    with_host = chance.random() < 0.5
    world.note(f"freeze {name} for {for_s} s" + (" and its host" if with_host else ""))
    world.health.touch(name, for_s + AFTERMATH_S)
    world.stands_still(name, for_s)
    worker = world.workers[name]
    worker.freeze(for_s)
    if with_host and worker.host is not None:
        worker.host.freeze(world.time.now + for_s)


def freeze_host(world: "World", chance: Random) -> None:
    """SIGSTOP and SIGCONT of an engine host; its worker goes on."""
    name = chance.choice(sorted(world.workers))
    for_s = chance.choice([1.0, 3.0, 9.0])
    world.note(f"freeze the engine host of {name} for {for_s} s")
    world.health.disturb(for_s)
    world.stands_still(name, for_s)
    host = world.workers[name].host
    if host is not None:
        host.freeze(world.time.now + for_s)


def kill_host(world: "World", chance: Random, name: str = "") -> None:
    """Kill -9 of the engine host of a worker."""
    name = name or chance.choice(sorted(world.workers))
    world.note(f"kill the engine host of {name}")
    world.health.touch(name, AFTERMATH_S)
    world.workers[name].kill_host()


def sick_engine(world: "World", chance: Random) -> None:
    """An engine answers with errors for a while: its worker lives, and is no use."""
    host = world.workers[chance.choice(sorted(world.workers))].host
    if host is not None:
        host.sick_until = world.time.now + chance.uniform(3, 12)


def cut_worker(world: "World", chance: Random, name: str = "") -> None:
    """A partition between a worker (or the store) and the router."""
    name = name or chance.choice([*sorted(world.workers), "store"])
    _cut(world, chance, name, _some_router(world, chance))


def cut_client(world: "World", chance: Random) -> None:
    """A partition between a client and the router."""
    name = chance.choice(sorted(world.clients))
    _cut(world, chance, name, _some_router(world, chance))


def isolate_worker(world: "World", chance: Random) -> None:
    """A partition between a worker and everybody, its streams included."""
    _cut(world, chance, chance.choice(sorted(world.workers)), EVERYBODY)


def half_open(world: "World", chance: Random) -> None:
    """A link dies, and neither side is told."""
    name = chance.choice([*sorted(world.workers), *sorted(world.clients), "store"])
    world.note(f"link of {name} is half-open")
    world.health.touch(name, AFTERMATH_S)
    world.net.mute(name)


def restart_router(world: "World", chance: Random) -> None:
    """Kill -9 of the router, with its machine or alone; another one is started."""
    _restart_router(world, chance.uniform(0.05, 3), is_silent=chance.random() < 0.3)


def blink_router(world: "World", chance: Random) -> None:
    """The router is soon back, and a worker that goes on under its lease reaches it late."""
    name = chance.choice(sorted(world.workers))
    cut_s = chance.uniform(0.8, 2.2)
    world.note(f"cut {name} off for {cut_s:.2f} s")
    world.health.touch(name, cut_s + AFTERMATH_S)
    _cut_off(world, name, world.routers.active.name, cut_s)
    _restart_router(world, chance.uniform(0.05, 0.3), is_silent=False)


def freeze_router(world: "World", chance: Random) -> None:
    """SIGSTOP and SIGCONT of the router."""
    for_s = chance.choice([0.6, 0.9, 2.0, 3.2, 5.0])
    world.note(f"freeze the router for {for_s} s")
    world.health.disturb(for_s + AFTERMATH_S)
    if for_s > SHORT_FREEZE_S:
        world.health.router_thaws_at = world.time.now + for_s
        world.health.touch("router", for_s + ROUTER_AFTERMATH_S)
    world.routers.active.freeze(for_s)


def second_router(world: "World", chance: Random) -> None:
    """Somebody starts a second router; one of the two is stopped a little later."""
    routers = world.routers
    if isinstance(routers, RouterPair) or not routers.current.is_alive:
        return
    is_first_to_go = chance.random() < 0.5
    both_s = chance.uniform(0.2, SPLIT_S) * (1 if is_first_to_go else 3)
    which = "first" if is_first_to_go else "second"
    world.note(f"a second router; the {which} one is stopped after {both_s:.2f} s")
    world.health.touch("router", both_s + ROUTER_AFTERMATH_S)
    routers.replace()
    world.later(both_s, lambda: routers.unite(keeps_first=not is_first_to_go))


def restart_client(world: "World", chance: Random) -> None:
    """Kill -9 of a client; another one of its name comes after a while."""
    name = chance.choice(sorted(world.clients))
    latest_s = world.scenario.probe_s - 10
    # Back before the probes are sent; the longest absence is longer than the router's patience.
    away_s = min(chance.choice([0.5, 5.0, 35.0]), max(1.0, latest_s - world.elapsed_s))
    world.note(f"kill {name} for {away_s} s")
    world.clients[name].kill()
    world.later(away_s, lambda: world.revive_client(name))


def freeze_client(world: "World", chance: Random) -> None:
    """SIGSTOP and SIGCONT of a client."""
    name = chance.choice(sorted(world.clients))
    for_s = chance.choice([1.0, 3.0, 8.0])
    world.note(f"freeze {name} for {for_s} s")
    world.health.disturb(for_s + AFTERMATH_S)
    world.clients[name].freeze(for_s)


def ambush_update(world: "World", chance: Random) -> None:
    """Something fails when the next weight update has come to a certain point."""
    world.ambushes.lay(chance)


def restart_store(world: "World", chance: Random) -> None:
    """Kill -9 of the weight store; its record survives."""
    away_s = chance.uniform(0.5, 8.0)
    world.note(f"kill the store for {away_s:.2f} s")
    world.store.kill()
    world.later(away_s, world.revive_store)


def poison(world: "World", _chance: Random) -> None:
    """A request that kills the engine host of every worker it is tried on."""
    world.note("a poison request")
    world.health.disturb(30.0)
    world.workload.ask_poison()


def lose_router(world: "World", chance: Random) -> None:
    """Kill -9 of the active router; it stays away for so long that the other one takes over."""
    for_s = _lasting(world, chance.uniform(6, 25))
    _restart_router(world, for_s, is_silent=chance.random() < 0.5)


def strand_router(world: "World", chance: Random) -> None:
    """SIGSTOP of the active router, and SIGCONT when the other one has taken over."""
    router, for_s = world.routers.active, _lasting(world, chance.uniform(4, 16))
    world.note(f"freeze {router.name} for {for_s:.1f} s")
    world.health.touch("router", for_s + ROUTER_AFTERMATH_S)
    router.freeze(for_s)


def part_routers(world: "World", chance: Random) -> None:
    """A partition between the two routers, in one direction or both; all others reach both."""
    if not isinstance(world.routers, RouterPair):
        return
    one, other = chance.sample(world.routers.names, 2)
    for_s, is_both = _lasting(world, chance.uniform(2, 25)), chance.random() < 0.7
    world.note(f"cut {one} {'<' if is_both else ''}> {other} for {for_s:.1f} s")
    world.weather.cut(one, other, world.time.now + for_s)
    if is_both:
        world.weather.cut(other, one, world.time.now + for_s)


def freeze_second(world: "World", chance: Random) -> None:
    """SIGSTOP and SIGCONT of the router that stands by."""
    if isinstance(world.routers, RouterPair):
        for_s = chance.choice([0.9, 2.0, 5.0, 9.0])
        world.note(f"freeze {world.routers.second.name}, which stands by, for {for_s} s")
        world.routers.second.freeze(for_s)


def kill_second(world: "World", chance: Random) -> None:
    """Kill -9 of the router that stands by; it is started again."""
    if isinstance(world.routers, RouterPair):
        for_s = chance.uniform(0.05, 8)
        world.note(f"kill {world.routers.second.name}, which stands by, for {for_s:.2f} s")
        world.routers.second.kill()
        world.later(for_s, world.routers.revive)


def isolate_router(world: "World", chance: Random) -> None:
    """A partition between the active router and everybody."""
    name, for_s = world.routers.active.name, _lasting(world, chance.uniform(2, 15))
    world.note(f"cut {name} off from everybody for {for_s:.1f} s")
    world.health.touch("router", for_s + ROUTER_AFTERMATH_S)
    _cut_off(world, name, EVERYBODY, for_s)


def split_fleet(world: "World", chance: Random) -> None:
    """A partition with one router, and some workers and clients, on each side."""
    if not isinstance(world.routers, RouterPair):
        return
    for_s = _lasting(world, chance.uniform(4, 20))
    first, second = world.routers.names
    everybody = [*sorted(world.workers), *sorted(world.clients), "store"]
    there = {name for name in everybody if chance.random() < 0.5}
    world.note(f"{second} and {', '.join(sorted(there))} are cut off for {for_s:.1f} s")
    world.health.touch("router", for_s + ROUTER_AFTERMATH_S)
    _cut_off(world, first, second, for_s)
    for name in everybody:
        world.health.touch(name, for_s + AFTERMATH_S)
        _cut_off(world, name, first if name in there else second, for_s)


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        kill_worker, freeze_worker, freeze_host, kill_host, sick_engine, cut_worker, cut_client,
        isolate_worker, half_open, restart_router, blink_router, freeze_router, second_router,
        restart_client, freeze_client, restart_store, ambush_update, poison,
        lose_router, strand_router, part_routers, freeze_second, kill_second, isolate_router,
        split_fleet,
    )
}  # fmt: skip
"""By name."""
OF_A_PAIR = frozenset({
    "lose_router", "strand_router", "part_routers", "freeze_second", "kill_second",
    "isolate_router", "split_fleet",
})  # fmt: skip
KINDS = sorted(FAULTS.keys() - OF_A_PAIR)
"""For a fleet with one router."""
PAIR_KINDS = sorted(FAULTS.keys() - {"second_router"})
"""For a fleet with two of which one stands by."""


def _some_router(world: "World", chance: Random) -> str:
    names = world.routers.names
    return names[0] if len(names) == 1 else chance.choice(names)


def _lasting(world: "World", for_s: float) -> float:
    """A long fault is over, and made good, before the probes are sent."""
    return max(1.0, min(for_s, world.scenario.faults_s + LATEST_S - world.elapsed_s))


def _cut_off(world: "World", one: str, other: str, for_s: float) -> None:
    """Nothing passes between the two for so long."""
    for way in ((one, other), (other, one)):
        world.weather.cut(*way, world.time.now + for_s)


def _restart_router(world: "World", down_s: float, *, is_silent: bool) -> None:
    router = world.routers.active
    if not router.is_alive:
        return
    world.note(f"kill the {router.name}{' silently' if is_silent else ''} for {down_s:.2f} s")
    world.health.touch("router", down_s + ROUTER_AFTERMATH_S)
    router.kill(is_silent=is_silent)
    world.later(down_s, world.routers.revive)


def _cut(world: "World", chance: Random, one: str, other: str) -> None:
    """Nothing passes for a while, in one direction or both, not always for the same time."""
    there_s, back_s = (chance.choice([0.5, 1.2, 2.0, 3.0, 6.0]) for _ in range(2))
    way = chance.choice(["both", "there", "back"])
    there_s, back_s = there_s * (way != "back"), back_s * (way != "there")
    world.note(f"cut {one} > {other} for {there_s} s, {other} > {one} for {back_s} s")
    world.health.touch(one, max(there_s, back_s) + AFTERMATH_S)
    if there_s:
        world.weather.cut(one, other, world.time.now + there_s)
    if back_s:
        world.weather.cut(other, one, world.time.now + back_s)
