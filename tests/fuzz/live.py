"""A live fleet under attack while a client works: `python tests/fuzz/live.py --raw 100000 …`.

Raw connections with garbage go to every port; then peers that know the protocol say what they must
not. Exits with 1 if a process died, a message came from nowhere, the client got anything but its
own tokens, or descriptors were left open.
"""

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import rolloutbus
from rolloutbus import Fleet, RolloutClient
from rolloutbus.bus.security.keys import SecuritySettings
from rolloutbus.bus.security.zmq_curve import dialer_of
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.transport.endpoints import split_key
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.fuzz.garbage import connect_and_say, nonsense
from tests.fuzz.intruder import Intruder
from tests.integration.key_directory import KeyDirectory
from tests.integration.live_fleet import DEADLINE_S, assert_fake_rollout, fake_sampling

PATIENT = LeaseSettings(lease_s=30.0, holder_s=24.0, silence_s=20.0, recovery_s=31.0)
"""A worker that is only slow under attack is none that died of it. Nobody connects anew because of
a slow router: what was on its way through the old connection would come from a stranger."""
AT_ONCE = 32
"""Attackers side by side."""
N_ECHO_TOKENS = 8
SETTLE_S = 60.0
"""At most this long until the last attacker's descriptors are gone: handshakes end after 10 s."""
STEADY_S = 1.0
"""What did not change for so long is taken for what was there before the attack."""
LOOK_S = 0.2


class Echo:
    """A client that generates all the time and checks every token."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._task: asyncio.Task[None] | None = None
        self.n_asked = 0
        self.n_right = 0
        self.slowest_s = 0.0

    async def ask(self) -> None:
        """One request and its answer, which must be right."""
        self.n_asked += 1
        prompt = [self.n_asked % 1000, 2, 3]
        begun = time.monotonic()
        rollout = await self._client.generate(
            prompt, fake_sampling(N_ECHO_TOKENS), deadline_s=DEADLINE_S
        )
        self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
        assert_fake_rollout(prompt, rollout, N_ECHO_TOKENS)
        self.n_right += 1

    @asynccontextmanager
    async def going(self) -> AsyncGenerator[None]:
        """Ask again and again; what went wrong is raised at the end."""
        is_over = False

        async def work() -> None:
            while not is_over:
                await self.ask()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(work())
            try:
                yield
            finally:
                is_over = True


class Target:
    """The processes and ports of a fleet."""

    def __init__(self, fleet: Fleet, client: RolloutClient) -> None:
        streams = [member.stream for member in client.connection.members]
        store = client.connection.upstream.bulk
        bulk = [store] if store else []
        self.routers = [fleet.address, fleet.backend]
        self.streams = streams
        self.bulk = bulk
        hosts = [pid for name in fleet.worker_names for pid in fleet.host_pids(name)]
        self.pids = {**fleet.pids, **{f"host {pid}": pid for pid in hosts}}

    @property
    def ports(self) -> list[tuple[str, int]]:
        """(host, port) of everything that listens."""
        found: list[tuple[str, int]] = []
        for endpoint in (*self.routers, *self.streams, *self.bulk):
            address = urlsplit(split_key(endpoint)[0])
            assert address.hostname is not None
            assert address.port is not None
            found.append((address.hostname, address.port))
        return found

    def fds(self) -> set[str]:
        """What is open in whom: files, pipes, and the two ends of each TCP connection.

        Raises:
            FileNotFoundError: one of them has died.
        """
        found: set[str] = set()
        for name, pid in self.pids.items():
            ends = {
                f"socket:[{words[9]}]": f"tcp {words[1]} {words[2]} state {words[3]}"
                for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
                if (words := line.split())
            }
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    link = str(fd.readlink())
                    found.add(f"{name}: {fd.name} {link} {ends.get(link, '')}".strip())
        return found

    def rss_kib(self) -> dict[str, int]:
        """Resident memory of each."""
        return {
            name: 4 * int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            for name, pid in self.pids.items()
        }

    async def steady_fds(self) -> set[str]:
        """What is open in whom once it is the same for a while: processes take up their links when
        they come to it, which on a busy machine is after the first answer."""
        deadline = time.monotonic() + SETTLE_S
        found, since = self.fds(), time.monotonic()
        # Nothing tells when another process opens a descriptor.
        while time.monotonic() - since < STEADY_S and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
            if (now := self.fds()) != found:
                found, since = now, time.monotonic()
        return found

    async def settled_fds(self, before: int) -> int:
        """How many more descriptors are open than before, once no more are closed."""
        deadline = time.monotonic() + SETTLE_S
        # Nothing tells when another process closes a descriptor.
        while (growth := len(self.fds()) - before) > 0 and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        return growth


async def in_lanes(n: int, one: Callable[[], Awaitable[None]]) -> None:
    """Do it n times, AT_ONCE at a time."""
    todo = iter(range(n))

    async def lane() -> None:
        for _ in todo:
            await one()

    async with asyncio.TaskGroup() as lanes:
        for _ in range(min(AT_ONCE, n)):
            lanes.create_task(lane())


async def attack_raw(target: Target, n: int, rng: random.Random) -> int:
    """Connections with garbage, to all ports in turn; returns how many were made."""
    n_made = 0
    ports = target.ports

    async def one() -> None:
        nonlocal n_made
        host, port = rng.choice(ports)
        is_made = await connect_and_say(host, port, nonsense(rng))
        n_made += is_made

    await in_lanes(n, one)
    return n_made


async def attack_knowing(
    target: Target, n: int, rng: random.Random, key: SecuritySettings | None
) -> dict[str, int]:
    """Messages by peers that speak the protocol; what they were answered."""
    intruder = Intruder(target, rng, dialer_of(key))
    await intruder.attack(n)
    return intruder.answers


def keys_in(directory: Path) -> KeyDirectory:
    """Keys of two clients: who works, and who will do no good."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    keys = KeyDirectory(directory)
    keys.add("echo", "client")
    keys.add("intruder", "client")
    return keys


@asynccontextmanager
async def guarded_or_not(
    keys: Path | None,
) -> AsyncGenerator[tuple[Fleet, RolloutClient, SecuritySettings | None]]:
    """A fleet, its client, and the key of an intruder, who is a client like any other."""
    known = keys_in(keys) if keys is not None else None
    own, others = (
        known.client_settings(name) if known is not None else None for name in ("echo", "intruder")
    )
    async with rolloutbus.up(
        workers=1, engine="fake", transport="tcp", secure=keys, lease=PATIENT
    ) as fleet:
        settings = ClientSettings(name="echo", router=fleet.address, lease=PATIENT, security=own)
        async with RolloutClient(settings) as client:
            yield fleet, client, others


async def besiege(
    n_raw: int, n_knowing: int, seed: int, keys: Path | None = None
) -> dict[str, Any]:
    """Both attacks on a fresh fleet, guarded if there is a directory for keys; what came of it."""
    rng = random.Random(seed)
    async with guarded_or_not(keys) as (fleet, client, key):
        echo = Echo(client)
        await echo.ask()
        target = Target(fleet, client)
        before = await client.status()
        fds = await target.steady_fds()
        rss, begun = target.rss_kib(), time.monotonic()
        async with echo.going():
            n_made = await attack_raw(target, n_raw, rng)
            raw_s = time.monotonic() - begun
            after_raw = await client.status()
            answers = await attack_knowing(target, n_knowing, rng, key)
        knowing_s = time.monotonic() - begun - raw_s
        fd_growth = await target.settled_fds(len(fds))
        opened = target.fds() - fds if fd_growth > 0 else set[str]()
        await echo.ask()
        after = await client.status()
        counters = client.connection.counters
        return {
            "raw": n_made,
            "authenticated": n_knowing,
            "seed": seed,
            "guarded": keys is not None,
            "crashes": _n_changed(before, after),
            "ghosts": _n_ghosts(before, after_raw) + counters.unexpected_in + counters.malformed_in,
            "echo_asked": echo.n_asked,
            "echo_right": echo.n_right,
            "echo_slowest_s": round(echo.slowest_s, 2),
            "fd_growth": fd_growth,
            "opened": sorted(opened),
            "rss_growth_kib": {name: kib - rss[name] for name, kib in target.rss_kib().items()},
            "answers": answers,
            "counters": after.counters,
            "raw_seconds": round(raw_s, 1),
            "authenticated_seconds": round(knowing_s, 1),
        }


def is_unharmed(found: dict[str, Any]) -> bool:
    """Whether the fleet withstood."""
    return (
        found["crashes"] == 0
        and found["ghosts"] == 0
        and found["echo_right"] == found["echo_asked"]
        and found["fd_growth"] <= 0
    )


def _n_changed(before: rolloutbus.types.FleetStatus, after: rolloutbus.types.FleetStatus) -> int:
    """Processes that are others than before."""
    was = {worker.name: (worker.pid, worker.epoch) for worker in before.workers}
    now = {worker.name: (worker.pid, worker.epoch) for worker in after.workers}
    return (before.instance != after.instance) + sum(now.get(name) != was[name] for name in was)


def _n_ghosts(before: rolloutbus.types.FleetStatus, after: rolloutbus.types.FleetStatus) -> int:
    """Entries that raw connections got through to the router's core."""
    names = ("joins", "strangers")
    grown = sum(after.counters.get(name, 0) - before.counters.get(name, 0) for name in names)
    return grown + after.n_clients - before.n_clients


def main() -> int:
    """Read the command line, attack, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--raw", type=int, default=100_000)
    parser.add_argument("--authenticated", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--secure", type=Path, help="directory for keys: a fleet that has them")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args()
    found = asyncio.run(besiege(options.raw, options.authenticated, options.seed, options.secure))
    if options.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{key}: {value}" for key, value in found.items()))
    return 0 if is_unharmed(found) else 1


if __name__ == "__main__":
    sys.exit(main())
