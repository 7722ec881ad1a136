"""A simulated client process: the shipped client core, and a record of what its callers saw."""

from functools import partial
from typing import Protocol, cast

from rolloutbus.bus.actor.effects import Connect, Send
from rolloutbus.bus.wire.codec import topic_of, unpack
from rolloutbus.bus.wire.commands import ENDINGS
from rolloutbus.bus.wire.entry import Attempt, Entry
from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Lost
from rolloutbus.bus.wire.messages.generation import (
    Attach,
    DetachedList,
    DetachedRequest,
    Generate,
    ListDetached,
)
from rolloutbus.trainer_adapter.client.core.core import ClientCore
from rolloutbus.trainer_adapter.client.core.effects import (
    Complete,
    Deliver,
    Effect,
    FleetChanged,
    Outcome,
    Stopped,
    Subscribe,
    Unsubscribe,
)
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.results import Delta
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.drills.simulation.memory_ports import MemoryNet
from tests.drills.simulation.peeks import has_rejected, is_idle_client
from tests.drills.simulation.process import FRONT, TICK_S, Process
from tests.drills.simulation.sim_link import SimLink

NEVER = float("inf")
LIST_S = 5.0
"""Deadline of a question for detached requests: a router that recovers does not answer it."""
ATTACHED_S = 15.0
"""Least deadline of one that is taken up: its own may be over, and its ending wait."""


class Case:
    """One request as its caller sees it."""

    __slots__ = (
        "ask", "asked_at", "behind_s", "client", "deadline_at", "deltas", "ended_at", "fleet",
        "gives_up_at", "is_attached", "is_detached", "outcomes", "was_aborted", "was_lost",
    )  # fmt: skip

    def __init__(self, client: "ClientNode", ask: Ask, deadline_s: float) -> None:
        self.client = client
        self.ask = ask
        self.is_detached = ask.is_detached
        """Whether it goes on without its caller."""
        self.asked_at = client.time.now
        self.deadline_at = self.gives_up_at = self.asked_at + deadline_s
        """Of the request, and of whoever waits for it."""
        self.fleet = client.core.fleet
        """That its client knew when it was asked."""
        self.is_attached = False
        """Its caller has taken it up from an earlier process, or after giving it up."""
        self.ended_at = 0.0
        self.behind_s = 0.0
        """For how long some workers had been behind by then."""
        self.outcomes: list[Outcome] = []
        self.deltas: list[Delta] = []
        self.was_aborted = False
        self.was_lost = False
        """One of its executions was gone when it ended."""

    def taken_up(self, client: "ClientNode", deadline_s: float) -> "Case":
        """The same request for another caller."""
        case = Case(client, self.ask, 0.0)
        case.is_attached = True
        case.asked_at, case.deadline_at = self.asked_at, self.deadline_at
        case.gives_up_at = client.time.now + deadline_s
        case.was_aborted = self.was_aborted
        return case


class ClientWatch(Protocol):
    """Who looks on while it happens."""

    def took_dead(self, entry: Entry) -> None:
        """A client took the ending of an execution that it knew to be lost."""
        ...

    def completed(self, case: Case, rid: str) -> None:
        """A caller was given an outcome."""
        ...


class ClientNode(Process):
    """One client."""

    tick_s = 2 * TICK_S  # nobody waits for it, and each tick has its heartbeat

    def __init__(
        self, name: str, net: MemoryNet, watch: ClientWatch, boot: int, router: str = FRONT
    ) -> None:
        """`router`: address of the router, or of both of a pair."""
        super().__init__(name, net.time)
        self._watch = watch
        self._link = SimLink(self, net, router, self._from_router, self._link_down)
        self.was_dismissed = False
        settings = ClientSettings(name=name, router=router)
        chance = self.time.chance(f"{name}/{boot}")
        self.core = ClientCore(settings, f"{chance.getrandbits(128):032x}", chance)
        self.cases: dict[str, Case] = {}
        self.given_up: list[tuple[str, Case]] = []
        """(rid, request) of those that were taken up again by this process itself."""
        self.ended_at = NEVER
        self._left: dict[str, Case] = {}
        """Detached requests that it looks for."""
        self._dead: set[tuple[str, Attempt]] = set()
        """Executions that this client was told are lost."""
        self.told_lost_at: dict[str, float] = {}
        """rid -> when it was told so last."""
        self._subscriber = net.subscriber(
            name, lambda _, entries: self.hear(self._stream, entries), [topic_of(name)]
        )
        self._apply(self.core.start(self.time.now))
        self.start_ticking(chance.random())

    @property
    def n_open(self) -> int:
        """Requests of callers that have no outcome yet."""
        return sum(not case.outcomes for case in self.cases.values())

    def ask(self, ask: Ask, deadline_s: float) -> str:
        """Submit a request; returns its rid."""
        rid, effects = self.core.submit(ask, deadline_s, self.time.now)
        self.cases[rid] = Case(self, ask, deadline_s)
        self._apply(effects)
        return rid

    def reattach(self, left: dict[str, Case]) -> None:
        """Take up what is found of these detached requests."""
        self._left = left
        if not self.is_alive:
            return
        self.ask(Ask("list_detached", ListDetached()), LIST_S)

    def abort(self, rid: str) -> None:
        """The caller has changed its mind."""
        if self.is_alive:
            self.cases[rid].was_aborted = True
            self._apply(self.core.abort([rid], self.time.now)[1])

    def kill(self) -> None:
        """As SIGKILL: nobody waits for its requests any more."""
        self.ended_at = min(self.ended_at, self.time.now)
        self.is_alive = False
        self._subscriber.close()
        self._link.close()

    def tick(self) -> None:
        """Time passes."""
        if not is_idle_client(self.core, self.time.now) or self.thawed_at == self.time.now:
            self._apply(self.core.tick(self.time.now))

    def _stream(self, entries: list[Entry]) -> None:
        self._apply(self.core.receive_stream(entries, self.time.now))

    def _apply(self, effects: list[Effect]) -> None:
        listed: list[DetachedRequest] = []
        for effect in effects:
            if isinstance(effect, Send):  # by far the most
                self._link.send(effect.entry)
                continue
            match effect:
                case Deliver(rid, delta):
                    self.cases[rid].deltas.append(delta)
                case Complete(rid, outcome):
                    self.cases[rid].outcomes.append(outcome)
                    self._watch.completed(self.cases[rid], rid)
                    if isinstance(outcome, DetachedList):
                        listed += outcome.requests
                    elif self.cases[rid].ask.kind == "list_detached":
                        self.time.later(TICK_S, partial(self.reattach, self._left))
                case FleetChanged():
                    self.core.accept_fleet()
                case Connect(n_lost):
                    self._link.connect(n_lost)
                case Stopped():
                    self.was_dismissed = True
                    self.kill()
                case Subscribe(endpoint):
                    self._subscriber.connect(endpoint)
                case Unsubscribe(endpoint):
                    self._subscriber.disconnect(endpoint)
                case _:
                    pass
        self._link.flush()
        for each in listed:
            self._attach(each.rid)

    def _attach(self, rid: str) -> None:
        """Wait for a detached request from now on, unless it has ended or is waited for."""
        left, waits = self._left.pop(rid, None), self.cases.get(rid)
        if left is None or (waits is not None and not waits.outcomes):
            return
        deadline_s = max(ATTACHED_S, left.deadline_at - self.time.now)
        is_followed = isinstance(left.ask.body, Generate) and left.ask.body.stream
        attach = Ask("attach", Attach(), on_loss="fail", rid=rid, is_followed=is_followed)
        try:
            effects = self.core.submit(attach, deadline_s, self.time.now)[1]
        except Refused:
            return  # its loss was told: the request is over, even if a router still lists it
        if waits is not None:
            self.given_up.append((rid, waits))
            # It asks for whatever became of the request, as somebody who knows of no execution.
            self._dead = {key for key in self._dead if key[0] != rid}
        self.cases[rid] = left.taken_up(self, deadline_s)
        self._apply(effects)

    def _from_router(self, entries: list[Entry]) -> None:
        if len(entries) == 1 and entries[0].kind == "lease":  # by far the most
            effects = self.core.receive(entries, self.time.now)
            if effects:
                self._apply(effects)
            return
        endings: list[tuple[Entry, bool]] = []
        lost: list[tuple[str, Attempt]] = []
        for entry in entries:
            if entry.kind in ENDINGS and not self._is_over(entry.rid):
                endings.append((entry, (entry.rid, entry.attempt) in self._dead))
            elif entry.kind == "lost":
                lost += cast("Lost", unpack(entry)).items
        self._apply(self.core.receive(entries, self.time.now))
        if not has_rejected(self.core):  # or else it does not believe a word
            self._dead.update(lost)
            self.told_lost_at.update((rid, self.time.now) for rid, _ in lost)
        alive = {entry.rid for entry, was_dead in endings if not was_dead}
        for entry, was_dead in endings:
            if was_dead and entry.rid not in alive and self._is_over(entry.rid):
                self._watch.took_dead(entry)

    def _is_over(self, rid: str) -> bool:
        case = self.cases.get(rid)
        return case is None or bool(case.outcomes)

    def _link_down(self) -> None:
        self._apply(self.core.link_down(self.time.now))
