"""Two routers of one fleet: which of them is active, and when that changes.

Pure. Each of the two keeps a link to the other as a client does, and hears from it whether it is
active. No third one votes: see docs/decisions/0016-a-standby-router.md for what that costs.
Spec: docs/protocol.md, "A router and its standby".
"""

from typing import Literal, NamedTuple

from rolloutbus.bus.actor.effects import THE_LINK, Connect, Send, next_state
from rolloutbus.bus.backoff import Backoff, Chance
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import SPOKEN, pack, unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.limits import MAX_ROUTER_EPOCH
from rolloutbus.bus.wire.messages.membership import (
    ClientHeartbeat,
    Dismissed,
    Hello,
    Lease,
    Members,
    Welcome,
)
from rolloutbus.router.settings import PairSettings

PairState = Literal["asking", "standby", "active"]
PairEvent = Literal["other_active", "other_standby", "other_silent", "outranked"]

PAIR_LIFE: dict[PairState, dict[PairEvent, PairState]] = {
    # the first router has just started: the other one may have taken over meanwhile
    "asking": {"other_active": "standby", "other_standby": "active", "other_silent": "active"},
    # it turns everybody away, and watches the other one
    "standby": {"other_standby": "active", "other_silent": "active"},
    # it holds the fleet
    "active": {"outranked": "standby"},
}
"""state -> event -> state. The first of the two begins with `asking`, the second with `standby`."""

FIRST_EPOCH = 1
"""Of a router that has heard of none before it."""
ASKED_S = 5.0
"""A member that has asked for a router so lately is still looking for one."""
UNAWARE_S = 10.0
"""An active router that does not watch its standby after so long was not told of it."""


class Rank(NamedTuple):
    """Of an active router; of two, the one that ranks lower stands down."""

    has_workers: bool
    """The fleet is where its workers are."""
    epoch: int


Effect = Connect | Send


class Pair:
    """One router's view of the other."""

    def __init__(
        self,
        settings: PairSettings,
        leases: LeaseSettings,
        boot: str,
        chance: Chance,
        name: str = "router",
    ) -> None:
        """Watch nothing yet.

        Args:
            settings: of the pair.
            leases: of the fleet.
            boot: random 128-bit hex name of this process.
            chance: for the waits between connections.
            name: of the key that the other router knows this one by.
        """
        self._settings = settings
        self._leases = leases
        self._boot = boot
        self._name = f"{name}-{boot[:8]}"
        self._where = settings.other.partition("#")[0]
        self._backoff = Backoff(leases.reconnect_first_s, leases.reconnect_max_s, chance)
        self.state: PairState = "asking" if settings.is_first else "standby"
        self.epoch = FIRST_EPOCH
        """Of this router when it is active next: above all that it has heard of."""
        self.news = ""
        """Sentence for the operator about what has just changed; whoever says it empties it."""
        self._other: Literal["unknown", "standby", "active"] = "unknown"
        self._other_rank = Rank(has_workers=False, epoch=0)
        self._is_linked = False
        self._n_lost = 0
        self._connect_at = 0.0
        self._say_at = 0.0
        self._seq = 0
        self._began_at = 0.0
        """When it was started, or went on after it had stood still."""
        self._carried_at = 0.0
        """When the link was made, or carried something last: it may be dead while the other router
        says hello over a link of its own."""
        self._heard_at = 0.0
        """When the other router last showed that it lives."""
        self._ticked_at = 0.0
        self._asked = ("", float("-inf"))
        """(name of the member that was turned away last, when)."""
        self._active_since: float | None = None
        """Since when the other one says that it is active."""
        self._is_known = False
        """The other router watches this one."""
        self._has_complained = False

    def start(self, now: float) -> list[Effect]:
        """Begin to watch."""
        self._began_at = self._heard_at = self._ticked_at = now
        return self._connect(now)

    def turned_away(self, hello: Hello, now: float) -> None:
        """Somebody has said hello while this router was not active."""
        self._note_epoch(hello.router_epoch)
        if hello.role == "router":
            self._is_known = True
            self._heard_at = now
        elif hello.role != "client":
            self._asked = (hello.name, now)

    def tick(self, now: float, own: Rank) -> list[Effect]:
        """Time passes; `own` counts while this router is active."""
        if now - self._ticked_at > self._leases.late_tick_s:
            # We were frozen, and what the other one said meanwhile has not been read yet.
            grace_s = self._settings.takeover_s - self._leases.silence_s
            self._heard_at = max(self._heard_at, now - grace_s)
            self._carried_at = self._began_at = now
        self._ticked_at = now
        effects: list[Effect] = []
        if not self._is_linked:
            if now >= self._connect_at:
                effects = self._connect(now)
        elif now - self._carried_at > self._leases.silence_s:
            self.link_down(now)
        elif now >= self._say_at:
            effects = self._say(now)
        self._judge(now, own)
        return effects

    def receive(self, entries: list[Entry], now: float) -> None:
        """The other router says something."""
        self._carried_at = now
        for entry in entries:
            try:
                self._hear(unpack(entry), now)
            except RemoteProtocolError:
                continue

    def link_down(self, now: float) -> None:
        """The connection to the other router is gone, or mute."""
        if self._is_linked:
            self._is_linked = False
            self._other, self._active_since = "unknown", None
            self._n_lost += 1
            self._connect_at = now + self._backoff.next_s()

    def rejected(self, why: str, own: Rank) -> None:
        """Members say that they obey another router: this one is active no more."""
        self._note_epoch(own.epoch)
        self._other = "unknown"  # that it stood by is old news
        self._stand_down(f"{why}; this one stands by from now on")

    def _hear(self, body: object, now: float) -> None:
        match body:
            case Welcome():
                self._is_active_there(now, Rank(bool(body.members), body.router_epoch))
                self._backoff.reset()
            case Lease() if self._other == "active":
                self._is_active_there(now, self._other_rank._replace(epoch=body.router_epoch))
            case Members() if self._other == "active":
                self._is_active_there(
                    now, self._other_rank._replace(has_workers=bool(body.members))
                )
            case Dismissed(code="standby"):
                self._other, self._active_since, self._heard_at = "standby", None, now
                self._backoff.reset()
            case Dismissed():
                self._other, self._heard_at = "unknown", now  # it says hello again
            case _:
                pass

    def _is_active_there(self, now: float, rank: Rank) -> None:
        self._other, self._other_rank, self._heard_at = "active", rank, now
        if self._active_since is None:
            self._active_since = now
        self._note_epoch(rank.epoch)

    def _note_epoch(self, epoch: int) -> None:
        self.epoch = min(max(self.epoch, epoch + 1), MAX_ROUTER_EPOCH)

    def _judge(self, now: float, own: Rank) -> None:
        silent_s = now - self._heard_at
        match self.state:
            case "asking" if self._other == "active":
                self._move(
                    "other_active", f"the router at {self._where} is active: this one stands by"
                )
            case "asking" | "standby" if self._other == "standby" and self._settings.is_first:
                self._move("other_standby")
            case "asking" if now - self._began_at > self._leases.silence_s:
                self._move("other_silent")
            case "standby" if self._is_wanted(now, silent_s):
                who = self._asked[0]
                self._move(
                    "other_silent",
                    f"the router at {self._where} has not answered for {silent_s:.1f} s, and {who} "
                    f"asks for one: this one takes over, at router epoch {self.epoch}",
                )
            case "standby":
                self._look_whether_known(now)
            case "active" if self._other == "active" and self._outranks(own):
                self._note_epoch(own.epoch)
                self._stand_down(
                    f"the router at {self._where} is active, at router epoch "
                    f"{self._other_rank.epoch}; this one, at {own.epoch}, stands by from now on"
                )
            case _:
                pass

    def _is_wanted(self, now: float, silent_s: float) -> bool:
        """Whether the other router is gone, and not only for this one: members look for it too."""
        return silent_s >= self._settings.takeover_s and now - self._asked[1] <= ASKED_S

    def _outranks(self, own: Rank) -> bool:
        if self._other_rank == own:
            return not self._settings.is_first
        return self._other_rank > own

    def _stand_down(self, news: str) -> None:
        self._asked = ("", float("-inf"))
        self._move("outranked", news)

    def _move(self, event: PairEvent, news: str = "") -> None:
        self.state = next_state(PAIR_LIFE, self.state, event, "this router")
        self.news = news

    def _look_whether_known(self, now: float) -> None:
        since = self._active_since
        if self._is_known or self._has_complained or since is None or now - since < UNAWARE_S:
            return
        self._has_complained = True
        self.news = (
            f"the router at {self._where} does not know that this one stands by for it: start it "
            "with --standby and this one's address, or it will not notice when it was replaced"
        )

    def _connect(self, now: float) -> list[Effect]:
        self._is_linked, self._carried_at = True, now
        return [Connect(self._n_lost), *self._say(now)]

    def _say(self, now: float) -> list[Effect]:
        """Hello to a router that has not welcomed us, and a sign of life."""
        self._say_at = now + self._leases.heartbeat_s
        self._seq += 1
        said = [Entry("client_beat", body=pack(ClientHeartbeat(self._seq)))]
        if self._other != "active":
            # Without the epoch: who hears a higher one outbids it, and neither obeys the other.
            hello = Hello(role="router", name=self._name, boot=self._boot, protocol=SPOKEN)
            said.insert(0, Entry("hello", body=pack(hello)))
        return [Send(THE_LINK, each) for each in said]
