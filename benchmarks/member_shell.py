"""A member for benchmarks: it joins, sends heartbeats, and does what its core asks for."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from rolloutbus.bus.actor.effects import Connect, Send
from rolloutbus.bus.actor.loop import BootClock
from rolloutbus.bus.membership.core import MemberCore
from rolloutbus.bus.membership.deliveries import MemberEffect
from rolloutbus.bus.transport.zmq_ports import DealerPort
from rolloutbus.bus.wire.entry import AttemptKey, Entry
from rolloutbus.bus.wire.messages.membership import WorkerFacts

TICK_S = 0.1


class MemberShell:
    """The connection and the time of one member; lives until its process ends."""

    def __init__(
        self, endpoint: str, core: MemberCore, carry_out: Callable[[MemberEffect], None]
    ) -> None:
        """`endpoint`: the router's backend; `carry_out`: what is neither sent nor connected."""
        self._endpoint = endpoint
        self._core = core
        self._carry_out = carry_out
        self._clock = BootClock()
        self._port: DealerPort | None = None
        self.welcomed = asyncio.Event()

    def go_online(self, facts: WorkerFacts) -> None:
        """Join, and heartbeat from now on."""
        self._apply(self._core.online(facts, self._clock.now()))
        self._tick()

    def heartbeat(self) -> None:
        """Send a heartbeat now."""
        self._apply(self._core.heartbeat(self._clock.now()))

    def finished(self, key: AttemptKey, result: msgspec.Struct) -> None:
        """A command is done."""
        self._apply(self._core.ended("finished", key, result, self._clock.now()))

    def _apply(self, effects: Sequence[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(_, entry):
                    if self._port is not None:
                        self._port.send(entry)
                case Connect():
                    if self._port is not None:
                        self._port.close()
                    self._port = DealerPort(self._endpoint, self._receive)
                case _:
                    self._carry_out(effect)

    def _receive(self, entries: list[Entry]) -> None:
        self._apply(self._core.receive(entries, self._clock.now()))
        if self._core.state == "leased":
            self.welcomed.set()

    def _tick(self) -> None:
        self._apply(self._core.tick(self._clock.now()))
        asyncio.get_running_loop().call_later(TICK_S, self._tick)
