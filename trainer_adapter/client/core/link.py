"""The client's link to its router: hello, heartbeats, silence, fresh connections.

Spec: docs/protocol.md, "Membership".
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from rolloutbus.bus.actor.effects import THE_LINK, Connect, Send, next_state
from rolloutbus.bus.backoff import Backoff, Chance
from rolloutbus.bus.membership.lease import LeaseWitness
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import SPOKEN, TRACED_VERSION, pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.membership import (
    ClientHeartbeat,
    Goodbye,
    Hello,
    Lease,
    Rejected,
    Welcome,
)
from rolloutbus.trainer_adapter.client.core.effects import Effect

LinkState = Literal["down", "greeting", "up", "stopped"]

LINK_LIFE: dict[LinkState, dict[str, LinkState]] = {
    # no connection; the next try waits its backoff
    "down": {"connect": "greeting", "stop": "stopped"},
    # connected, hello sent, no welcome yet
    "greeting": {"welcome": "up", "fail": "down", "greet": "greeting", "stop": "stopped"},
    # welcomed: requests flow
    "up": {"welcome": "up", "fail": "down", "greet": "greeting", "stop": "stopped"},
    # dismissed for good, or closed
    "stopped": {},
}
"""state -> event -> state."""


@dataclass(frozen=True, slots=True)
class LinkIdentity:
    """Identity that the client sends in its hello."""

    name: str
    boot: str
    """Random 128-bit hex name of this process's client."""


class Upstream(NamedTuple):
    """The router, and the weight store, that a client talks to."""

    router: str
    """Instance of the router that is obeyed; empty before the first welcome."""
    bulk: str
    """Where the weight store serves bytes; empty while there is none."""


class RouterLink:
    """Decides when to connect, what to say, and when silence means that the router is gone."""

    def __init__(
        self, identity: LinkIdentity, settings: LeaseSettings, chance: Chance, out: list[Effect]
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._backoff = Backoff(settings.reconnect_first_s, settings.reconnect_max_s, chance)
        self._out = out
        self.state: LinkState = "down"
        self.router_epoch = 0
        self._instance = ""
        self._n_lost = 0
        self._connect_at = 0.0
        self._heard_at = 0.0
        self._heartbeat_at = 0.0
        self._ticked_at = 0.0
        self._lease_witness = LeaseWitness()
        self._rejected_instance = ""
        """Instance of the second router that was rejected last."""
        self.wants_marks = False
        """The router asks how prompts begin."""
        self.takes_traces = False
        """The router traces requests: entries may bear the trace that they belong to."""
        self.is_at_standby = False
        """The connection leads to a router that stands by for another one."""
        self.has_rejected = False
        """The connection leads to a second router: nothing that comes over it counts."""

    @property
    def is_up(self) -> bool:
        """Whether requests may be sent."""
        return self.state == "up"

    @property
    def instance(self) -> str:
        """The router process that is obeyed; empty before the first welcome."""
        return self._instance

    def start(self, now: float) -> None:
        """Connect for the first time."""
        self._ticked_at = now
        self._connect(now)

    def heard(self, now: float) -> None:
        """Something came from the router; before its welcome that does not count."""
        if self.state != "greeting":
            self._heard_at = now

    def answered(self, lease: Lease) -> None:
        """The router obeyed answers a heartbeat."""
        if lease.instance == self._instance:
            self._lease_witness.answered(lease.seq)
            self.router_epoch = max(self.router_epoch, lease.router_epoch)

    def welcomed(self, welcome: Welcome, now: float) -> bool:
        """Whether the welcome counts; a second router is rejected, and the connection dropped."""
        if self.state not in ("greeting", "up"):
            return False
        if self._instance and welcome.instance != self._instance:
            has_outlived = self._lease_witness.has_outlived(welcome.up_ms / 1000, now)
            is_second = has_outlived and not self._has_prevailed(welcome, now)
            if is_second or welcome.router_epoch <= self.router_epoch:
                self._reject(welcome.instance, now)
                return False
            self._lease_witness.rebound()
        self._advance("welcome")
        self._instance = welcome.instance
        self.router_epoch = max(self.router_epoch, welcome.router_epoch)
        self.takes_traces = welcome.protocol >= TRACED_VERSION
        self._backoff.reset()
        return True

    def greet_again(self, now: float) -> None:
        """The router does not know this connection: say hello on it again."""
        if self.state in ("greeting", "up"):
            self._advance("greet")
            self._greet(now)

    def failed(self, now: float) -> None:
        """The connection is gone or mute: try a fresh one after a while."""
        if self.state in ("greeting", "up"):
            self._advance("fail")
            self._n_lost += 1
            self._connect_at = now + self._backoff.next_s()

    def stood_by(self, now: float) -> None:
        """The router stands by for another one: try the next address."""
        self.is_at_standby = True
        if self.state == "up":  # it is our own router that says so
            self._lease_witness.rebound()
        self.failed(now)

    def stop(self, *, reason: str = "") -> None:
        """Leave for good; with a reason, say goodbye first."""
        if self.state == "stopped":
            return
        if reason and self.state != "down":
            self._send(Entry("goodbye", body=pack(Goodbye(reason))))
        self._advance("stop")

    def tick(self, now: float) -> bool:
        """Heartbeat, judge silence, reconnect. True if the link was up and is now given up."""
        was_up = self.state == "up"
        settings = self._settings
        if now - self._ticked_at > settings.late_tick_s:
            # We were frozen, and what the router said meanwhile has not been read yet.
            self._heard_at = max(self._heard_at, now - settings.heartbeat_s)
        self._ticked_at = now
        if self.state == "down" and now >= self._connect_at:
            self._connect(now)
        elif self.state in ("greeting", "up"):
            if now - self._heard_at > settings.silence_s:
                self.failed(now)
            elif now >= self._heartbeat_at:
                self._heartbeat(now)
        return was_up and self.state != "up"

    def _has_prevailed(self, welcome: Welcome, now: float) -> bool:
        """Whether a rejected second router answers again after the first was silent for a lease."""
        was_told = welcome.instance == self._rejected_instance
        return was_told and self._lease_witness.silence_s(now) > self._settings.lease_s

    def _reject(self, instance: str, now: float) -> None:
        self._rejected_instance = instance
        rejected = Rejected(self.router_epoch, self._instance)
        self._send(Entry("rejected", body=pack(rejected)))
        self.has_rejected = True
        self.failed(now)

    def _connect(self, now: float) -> None:
        self._advance("connect")
        self.has_rejected = self.is_at_standby = False
        self._out.append(Connect(self._n_lost))
        self._heard_at = now
        self._greet(now)

    def _greet(self, now: float) -> None:
        hello = Hello(
            role="client",
            name=self._identity.name,
            boot=self._identity.boot,
            router_epoch=self.router_epoch,
            router_instance=self._instance,
            protocol=SPOKEN,
        )
        self._send(Entry("hello", body=pack(hello)))
        self._heartbeat(now)

    def _heartbeat(self, now: float) -> None:
        self._heartbeat_at = now + self._settings.heartbeat_s
        self._send(
            Entry("client_beat", body=pack(ClientHeartbeat(self._lease_witness.heartbeat(now))))
        )

    def _send(self, entry: Entry) -> None:
        self._out.append(Send(THE_LINK, entry))

    def _advance(self, event: str) -> None:
        self.state = next_state(LINK_LIFE, self.state, event, "link")
