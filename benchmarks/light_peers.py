"""Many peers in one process: members that answer at once, clients that only stay connected.

Real hellos, heartbeats and leases over real sockets, but no engine and no process each. Prints one
JSON line when all have been welcomed, and lives until it is killed.

    python -m benchmarks.light_peers members|clients ENDPOINT FIRST COUNT [BEAT_S]
"""

import asyncio
import json
import secrets
import sys
import time
from random import Random
from typing import cast

import uvloop

from benchmarks.member_shell import MemberShell
from rolloutbus.bus.actor.effects import Connect, Send
from rolloutbus.bus.actor.loop import BootClock
from rolloutbus.bus.actor.process import die_with_parent
from rolloutbus.bus.membership.core import MemberCore, MemberIdentity, Vitals
from rolloutbus.bus.membership.deliveries import Execute, MemberEffect
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.transport.zmq_ports import DealerPort
from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Entry, RequestId
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.bus.wire.messages.membership import Welcome, WorkerFacts
from rolloutbus.trainer_adapter.client.core.effects import Effect
from rolloutbus.trainer_adapter.client.core.link import LinkIdentity, RouterLink

CLIENT_TICK_S = 0.25
"""Coarser than a real client's: a thousand of these share one loop."""
BEAT_S = LeaseSettings().heartbeat_s
SLOTS = 64
CAPABILITIES = ["generate", "pause", "resume"]


class LightMember:
    """A worker that finishes every command as soon as it arrives."""

    def __init__(self, endpoint: str, name: str, leases: LeaseSettings) -> None:
        self._state = "ready"
        identity = MemberIdentity("worker", name, secrets.token_hex(16))
        core = MemberCore(identity, leases, Random(), self._vitals)
        self._shell = MemberShell(endpoint, core, self._carry_out)
        self.welcomed = self._shell.welcomed
        self._shell.go_online(WorkerFacts("default", "", SLOTS, 4096, 32_000, "fake", CAPABILITIES))

    def _vitals(self) -> Vitals:
        return Vitals(state=self._state, free=SLOTS)

    def _carry_out(self, effect: MemberEffect) -> None:
        if not isinstance(effect, Execute):
            return
        entry = effect.entry
        if entry.kind in {"pause", "resume"}:
            self._state = "paused" if entry.kind == "pause" else "ready"
            self._shell.heartbeat()
        self._shell.finished((RequestId(entry.rid), entry.attempt), Done())


class LightClient:
    """The link of one client: it sends heartbeats, notices silence and connects again."""

    def __init__(self, endpoint: str, name: str, leases: LeaseSettings) -> None:
        self._endpoint = endpoint
        self._clock = BootClock()
        self._tick_s = min(CLIENT_TICK_S, leases.heartbeat_s)
        self._out: list[Effect] = []
        identity = LinkIdentity(name, secrets.token_hex(16))
        self._link = RouterLink(identity, leases, Random(), self._out)
        self._port: DealerPort | None = None
        self.welcomed = asyncio.Event()
        self._link.start(self._clock.now())
        self._apply()
        self._tick()

    def _apply(self) -> None:
        for effect in self._out:
            if isinstance(effect, Connect):
                if self._port is not None:
                    self._port.close()
                self._port = DealerPort(self._endpoint, self._receive, self._down)
            elif isinstance(effect, Send) and self._port is not None:
                self._port.send(effect.entry)
        self._out.clear()

    def _receive(self, entries: list[Entry]) -> None:
        now = self._clock.now()
        self._link.heard(now)
        for entry in entries:
            if entry.kind == "welcome":
                self._link.welcomed(cast("Welcome", unpack(entry)), now)
                self.welcomed.set()
            elif entry.kind == "dismissed":
                self._link.greet_again(now)
        self._apply()

    def _down(self) -> None:
        self._link.failed(self._clock.now())

    def _tick(self) -> None:
        self._link.tick(self._clock.now())
        self._apply()
        asyncio.get_running_loop().call_later(self._tick_s, self._tick)


async def serve(kind: str, endpoint: str, first: int, count: int, heartbeat_s: float) -> None:
    """Run all peers until the process is ended."""
    begun_at = time.perf_counter()
    peer_type = LightMember if kind == "members" else LightClient
    leases = LeaseSettings(heartbeat_s=heartbeat_s)
    peers = [peer_type(endpoint, f"{kind[0]}{first + number}", leases) for number in range(count)]
    for peer in peers:
        await peer.welcomed.wait()
    print(json.dumps({"welcomed_s": round(time.perf_counter() - begun_at, 3)}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_parent()
    kind, endpoint, first, count, *heartbeat = sys.argv[1:]
    uvloop.run(
        serve(kind, endpoint, int(first), int(count), float(heartbeat[0]) if heartbeat else BEAT_S)
    )
