"""A member and a router, every message delivered, delayed or dropped by choice."""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rolloutbus.bus.actor.effects import Connect, ForgetPeer, Send, SendAll
from rolloutbus.bus.membership.core import MemberCore, MemberIdentity
from rolloutbus.bus.membership.deliveries import MemberEffect
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import decode_batch, encode_batch
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.messages.membership import WorkerFacts
from rolloutbus.router.core import RouterCore
from rolloutbus.router.events import Effect, Received, Ticked
from rolloutbus.router.settings import RouterSettings
from tests.drills.simulation.peeks import holds_lease

FACTS = WorkerFacts("default", "ipc:///m/stream", 4, 4096, 32_000, "fake", ["generate"])
TICK_S = 0.25
Batch = tuple[Peer, bytes]


class Membership(RuleBasedStateMachine):
    """Batches wait in two queues until a rule delivers or loses them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.n_routers = self.n_links = 0
        self.peer = Peer(b"")
        self.to_router: list[Batch] = []
        self.to_member: list[Batch] = []
        self.router = self._new_router()
        identity = MemberIdentity("worker", "w0", "a" * 32)
        self.member = MemberCore(identity, LeaseSettings(), Random(1))
        self._apply_member(self.member.online(FACTS, self.now))
        self._everybody_hears_everything()

    def _new_router(self) -> RouterCore:
        self.n_routers += 1
        bounds = RouterSettings("ipc:///m/front", "ipc:///m/back")
        return RouterCore(bounds, f"router-{self.n_routers}", Random(1))

    @rule(ticks=st.integers(1, 5), hears=st.sampled_from(["nobody", "router", "member", "both"]))
    def time_passes(self, ticks: int, hears: str) -> None:
        for _ in range(ticks):
            self.now += TICK_S
            self._tick_router()
            self._tick_member()
        if hears in {"router", "both"}:
            self._router_hears()
        if hears in {"member", "both"}:
            self._member_hears()

    @rule(who=st.sampled_from(["router", "member"]), ticks=st.integers(2, 28))
    def somebody_is_frozen(self, who: str, ticks: int) -> None:
        for _ in range(ticks):
            self.now += TICK_S
            if who == "router":
                self._tick_member()
            else:
                self._tick_router()

    def _router_hears(self) -> None:
        while self.to_router:
            peer, frame = self.to_router.pop(0)
            self._apply_router(self.router.handle(Received(peer, decode_batch(frame)), self.now))

    def _member_hears(self) -> None:
        while self.to_member:
            peer, frame = self.to_member.pop(0)
            if peer == self.peer:  # a closed socket is never read again
                self._apply_member(self.member.receive(decode_batch(frame), self.now))

    @precondition(lambda self: bool(self.to_router))
    @rule()
    def an_old_batch_comes_last(self) -> None:
        self.to_router.append(self.to_router.pop(0))

    @rule(with_router=st.booleans())
    def the_link_breaks(self, with_router: bool) -> None:
        if with_router:
            self.router = self._new_router()
            self.to_router = []
        self.to_member = []
        self._apply_member(self.member.link_down(self.now))

    @invariant()
    def the_holder_gives_up_first(self) -> None:
        holder = self.member._holder  # pyright: ignore[reportPrivateUsage] - what the lease says
        if (
            not holds_lease(self.member, self.now)
            or holder.instance != self.router.context.instance
        ):
            return
        record = self.router.context.members.named("w0")
        assert record is not None, "the router dropped a lease that its holder still has"
        assert record.epoch == self.member.epoch
        assert holder._until <= record.expires_at  # pyright: ignore[reportPrivateUsage]

    def teardown(self) -> None:
        for _ in range(60):
            self.now += TICK_S
            self._tick_router()
            self._tick_member()
            self._everybody_hears_everything()
        assert holds_lease(self.member, self.now), "peace, and no lease"

    def _everybody_hears_everything(self) -> None:
        while self.to_router or self.to_member:
            self._router_hears()
            self._member_hears()

    def _tick_router(self) -> None:
        self._apply_router(self.router.handle(Ticked(), self.now))

    def _tick_member(self) -> None:
        self._apply_member(self.member.tick(self.now))

    def _apply_router(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendAll):
                self.to_member.append((effect.peer, encode_batch(effect.entries)))
            else:
                assert isinstance(effect, ForgetPeer)

    def _apply_member(self, effects: list[MemberEffect]) -> None:
        entries: list[Entry] = []
        for effect in effects:
            if isinstance(effect, Connect):
                self.n_links += 1
                self.peer = Peer(b"\x01" + self.n_links.to_bytes(15, "big"))
            elif isinstance(effect, Send):
                entries.append(effect.entry)
        if entries:
            self.to_router.append((self.peer, encode_batch(entries)))


class TestMembership(Membership.TestCase):
    settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
