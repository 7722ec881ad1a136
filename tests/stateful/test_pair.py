"""Two routers and their members under random faults: in the end one router holds them all."""

# pyright: reportPrivateUsage=false
# Mutants switch private decisions off.

import random
from collections.abc import Callable
from functools import partial

import pytest

from rolloutbus.bus.actor.effects import Connect, ForgetPeer, Send, SendAll
from rolloutbus.bus.membership.core import MemberCore, MemberIdentity
from rolloutbus.bus.membership.deliveries import MemberEffect
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import unpack_as
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.messages.membership import Hello, WorkerFacts
from rolloutbus.router.actor import turned_away
from rolloutbus.router.core import RouterCore
from rolloutbus.router.events import Effect, Received, Ticked
from rolloutbus.router.pair import Effect as PairEffect
from rolloutbus.router.pair import Pair, Rank
from rolloutbus.router.settings import TAKEOVER_S, PairSettings, RouterSettings

TICK_S = 0.05
LEASES = LeaseSettings()
SETTINGS = RouterSettings("ipc:///front", "ipc:///back")
FACTS = WorkerFacts("default", "ipc:///s", 8, 4096, 100, "fake", ["generate"])
N_MEMBERS = 3
MOVED_S = 10.0
"""A fleet whose router has gone is served again after this."""
SETTLED_S = 40.0
"""After the last fault there is one router again, with all members."""

Hears = Callable[[list[Entry]], None]
Tamper = Callable[[Pair | MemberCore], None]
"""Switches a protection off before anything happens."""


class Net:
    """Connections between processes; what is sent arrives a tick later, or never."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.cut: set[frozenset[str]] = set()
        """Pairs of names that do not hear each other."""
        self.routers: dict[str, Router] = {}
        self._waiting: list[Callable[[], None]] = []
        self._n_peers = 0
        self._ends: dict[Peer, tuple[str, str, Hears]] = {}
        """Connection -> (who made it, to whom, what hears the answers)."""

    def connect(self, who: str, whom: str, hears: Hears) -> Peer:
        self._n_peers += 1
        peer = Peer(self._n_peers.to_bytes(4, "big"))
        self._ends[peer] = (who, whom, hears)
        return peer

    def hang_up(self, peer: Peer | None) -> None:
        if peer is not None:
            self._ends.pop(peer, None)

    def ask(self, peer: Peer, entries: list[Entry]) -> None:
        """From who made the connection."""
        who, whom, _ = self._ends[peer]
        if frozenset((who, whom)) not in self.cut:
            self._waiting.append(lambda: self.routers[whom].hear(peer, entries))

    def answer(self, peer: Peer, entries: list[Entry]) -> None:
        """From the router at the other end."""
        who, whom, hears = self._ends.get(peer, ("", "", lambda _: None))
        if frozenset((who, whom)) not in self.cut:
            self._waiting.append(lambda: hears(entries) if peer in self._ends else None)

    def deliver(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each()


class Router:
    """One of the two; it obeys its `Pair` as the shell of a router does."""

    def __init__(self, net: Net, name: str, other: str, rng: random.Random, tamper: Tamper) -> None:
        self.net, self.name, self.other, self.rng = net, name, other, rng
        self.tamper = tamper
        self.is_alive = True
        self.frozen_until = 0.0
        self._inbox: list[Callable[[], None]] = []
        self._link: Peer | None = None
        self.start()

    def start(self) -> None:
        """A new process in the place of one that has ended."""
        self.is_alive, self._inbox = True, []
        self.core: RouterCore | None = None
        settings = PairSettings(f"ipc:///{self.other}", is_first=self.name == "a")
        self.pair = Pair(settings, LEASES, self.rng.randbytes(16).hex(), self.rng)
        self.tamper(self.pair)
        self._apply_pair(self.pair.start(self.net.now))

    def kill(self) -> None:
        self.is_alive, self.core = False, None
        self.net.hang_up(self._link)

    def hear(self, peer: Peer, entries: list[Entry]) -> None:
        self._later(partial(self._heard, peer, entries))

    def tick(self) -> None:
        now = self.net.now
        if not self.is_alive or now < self.frozen_until:
            return
        inbox, self._inbox = self._inbox, []
        for each in inbox:
            each()
        self._apply_pair(self.pair.tick(now, self.rank))
        if self.pair.state == "active" and self.core is not None and self.core.context.superseded:
            self.pair.rejected("superseded", self.rank)
        if self.pair.state == "active" and self.core is None:
            settings = RouterSettings("ipc:///f", "ipc:///b", epoch=self.pair.epoch)
            self.core = RouterCore(settings, self.rng.randbytes(16).hex(), self.rng)
        elif self.pair.state != "active" and self.core is not None:
            peers = [each.peer for each in self.core.context.members]
            peers += [each.peer for each in self.core.context.clients]
            self.core = None
            for peer in peers:
                self._apply(turned_away(peer))
        if self.core is not None:
            self._apply(self.core.handle(Ticked(), now))

    @property
    def rank(self) -> Rank:
        if self.core is None:
            return Rank(has_workers=False, epoch=0)
        return Rank(bool(self.core.context.members.workers()), self.core.context.router_epoch)

    def _later(self, what: Callable[[], None]) -> None:
        if self.is_alive:
            self._inbox.append(what)

    def _heard(self, peer: Peer, entries: list[Entry]) -> None:
        if self.core is not None:
            self._apply(self.core.handle(Received(peer, entries), self.net.now))
            return
        if entries[0].kind == "hello":
            self.pair.turned_away(unpack_as(Hello, entries[0]), self.net.now)
        self._apply(turned_away(peer))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendAll):
                self.net.answer(effect.peer, effect.entries)
            else:
                assert isinstance(effect, ForgetPeer)

    def _apply_pair(self, effects: list[PairEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Connect):
                self.net.hang_up(self._link)
                self._link = self.net.connect(self.name, self.other, self._heard_other)
            elif self._link is not None:
                self.net.ask(self._link, [effect.entry])

    def _heard_other(self, entries: list[Entry]) -> None:
        self._later(lambda: self.pair.receive(entries, self.net.now))


class Member:
    """A worker that knows both routers."""

    def __init__(self, net: Net, name: str, rng: random.Random, tamper: Tamper) -> None:
        self.net, self.name = net, name
        identity = MemberIdentity("worker", name, rng.randbytes(16).hex())
        self.core = MemberCore(identity, LEASES, rng)
        tamper(self.core)
        self._link: Peer | None = None
        self._apply(self.core.online(FACTS, net.now))

    def tick(self) -> None:
        self._apply(self.core.tick(self.net.now))

    def _apply(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Connect):
                self.net.hang_up(self._link)
                whom = "ab"[effect.n_lost % 2]
                self._link = self.net.connect(self.name, whom, self._heard)
            elif isinstance(effect, Send) and self._link is not None:
                self.net.ask(self._link, [effect.entry])

    def _heard(self, entries: list[Entry]) -> None:
        self._apply(self.core.receive(entries, self.net.now))


class World:
    """Both routers and all members."""

    def __init__(self, rng: random.Random, tamper: Tamper = lambda _: None) -> None:
        self.rng, self.net = rng, Net()
        for name, other in ("ab", "ba"):
            self.net.routers[name] = Router(self.net, name, other, rng, tamper)
        self.members = [Member(self.net, f"w{n}", rng, tamper) for n in range(N_MEMBERS)]
        self._restarts: list[tuple[float, Router]] = []

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.net.now += TICK_S
            self.net.deliver()
            for due_at, router in list(self._restarts):
                if self.net.now >= due_at:
                    self._restarts.remove((due_at, router))
                    router.start()
            for each in (*self.net.routers.values(), *self.members):
                each.tick()

    def fault(self) -> None:
        """One random thing goes wrong."""
        rng, router = self.rng, self.net.routers[self.rng.choice("ab")]
        names = ["a", "b", *(each.name for each in self.members)]
        match rng.choice(["kill", "freeze", "cut", "part", "mend"]):
            case "kill":
                if router.is_alive:
                    router.kill()
                    self._restarts.append((self.net.now + rng.choice([0.6, 2.0, 8.0]), router))
            case "freeze":
                router.frozen_until = self.net.now + rng.choice([0.5, 2.0, 4.0, 12.0])
            case "cut":
                self.net.cut.add(frozenset(rng.sample(names, 2)))
            case "part":
                self.net.cut.add(frozenset("ab"))
            case _:
                self.net.cut.clear()

    @property
    def active(self) -> list[Router]:
        return [each for each in self.net.routers.values() if each.core is not None]

    def holder(self) -> str:
        """The router that holds all members; empty: none does."""
        if len(self.active) != 1 or any(each.core.state != "leased" for each in self.members):
            return ""
        (router,) = self.active
        assert router.core is not None
        here = {each.name for each in router.core.context.members}
        return router.name if here == {each.name for each in self.members} else ""


def test_the_first_router_holds_a_fresh_fleet(rng: random.Random) -> None:
    world = World(rng)
    world.run(5.0)
    assert world.holder() == "a"


def test_the_fleet_moves_within_ten_seconds(rng: random.Random) -> None:
    world = World(rng)
    world.run(8.0)
    world.net.routers["a"].kill()
    world.run(MOVED_S)
    assert world.holder() == "b"
    core = world.net.routers["b"].core
    assert core is not None
    assert not core.context.is_recovering
    world.net.routers["a"].start()
    world.run(5.0)
    assert world.holder() == "b"


def test_a_router_that_stood_still_leaves_the_fleet_to_the_other(rng: random.Random) -> None:
    world = World(rng)
    world.run(8.0)
    world.net.routers["a"].frozen_until = world.net.now + 15.0
    world.run(14.0)
    assert world.net.routers["b"].core is not None
    world.run(5.0)
    assert world.holder() == "b"


def miss_each_other(world: World) -> None:
    """The routers do not hear each other, and the members hear both: nothing changes."""
    world.run(8.0)
    world.net.cut.add(frozenset("ab"))
    world.run(60.0)
    assert world.holder() == "a"


def meet_again(world: World) -> None:
    """Both were active, each with its members: one of them goes on with all, as it was."""
    world.run(8.0)
    world.net.cut |= {
        frozenset(each) for each in (("a", "b"), ("a", "w0"), ("a", "w1"), ("b", "w2"))
    }
    world.run(MOVED_S)
    second = world.net.routers["b"].core
    assert len(world.active) == 2
    world.net.cut.clear()
    world.run(5.0)
    assert world.holder() == "b"
    assert world.net.routers["b"].core is second


def come_back_unseen(world: World) -> None:
    """One was replaced while it stood still; only a member that comes by can tell it so."""
    world.run(8.0)
    world.net.routers["a"].frozen_until = world.net.now + 15.0
    world.run(14.0)
    world.net.cut = {frozenset("ab"), frozenset(("b", "w0"))}
    world.run(LEASES.silence_s + 1.2)  # it comes back, and w0 looks for another router
    world.net.cut = {frozenset("ab")}
    world.run(5.0)
    assert world.holder() == "b"


def unwished(core: Pair | MemberCore) -> None:
    """A router takes over when it alone cannot hear the other one."""
    if isinstance(core, Pair):
        core._is_wanted = _is_silent


def unreleased(core: Pair | MemberCore) -> None:
    """A member holds on to a router that has told it that it stands by."""
    if isinstance(core, MemberCore):
        core._holder.released = lambda: None


def unmoved(core: Pair | MemberCore) -> None:
    """A router stays active though members obey another one."""
    if isinstance(core, Pair):
        core.rejected = _nothing


def _is_silent(now: float, silent_s: float) -> bool:
    del now
    return silent_s >= TAKEOVER_S


def _nothing(why: str, own: Rank) -> None:
    del why, own


STORIES = {miss_each_other: unwished, meet_again: unreleased, come_back_unseen: unmoved}
"""What happens -> the protection that it needs, switched off."""


@pytest.mark.parametrize("story", STORIES)
def test_one_router_holds_the_fleet_whatever_the_two_believe(
    story: Callable[[World], None], rng: random.Random
) -> None:
    story(World(rng))


@pytest.mark.parametrize(("story", "mutant"), STORIES.items())
def test_each_protection_is_needed(
    story: Callable[[World], None], mutant: Tamper, rng: random.Random
) -> None:
    with pytest.raises(AssertionError):
        story(World(rng, mutant))


def test_after_any_faults_one_router_holds_all_members(
    rng: random.Random, *, is_exhaustive: bool
) -> None:
    for _ in range(300 if is_exhaustive else 6):
        seed = rng.getrandbits(32)
        world = World(random.Random(seed))
        for _ in range(world.rng.randint(3, 12)):
            world.run(world.rng.uniform(0.2, 8.0))
            world.fault()
        world.net.cut.clear()
        world.run(12.0 + SETTLED_S)  # the longest freeze, and the time to settle
        assert world.holder(), f"world {seed}: {[each.name for each in world.active]}"
