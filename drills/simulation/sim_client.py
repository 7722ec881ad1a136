"""A simulated client process: the shipped client core, and a record of what its callers saw."""

from functools import partial
from typing import Protocol, cast

from bus.codec import topic_of, unpack
from bus.effects import Connect, Send
from bus.entry import Entry
from bus.ids import Attempt
from bus.memory_ports import MemoryLink, MemoryNet
from bus.messages import ENDINGS
from bus.messages.delivery import Lost
from drills.simulation.peeks import has_rejected, is_idle_client
from drills.simulation.process import FRONT, TICK_S, Process
from trainer_adapter.client_core import ClientCore
from trainer_adapter.effects import (
    Complete,
    Deliver,
    Effect,
    Outcome,
    Stopped,
    Subscribe,
    Unsubscribe,
)
from trainer_adapter.requests import Ask
from trainer_adapter.rollout import Delta
from trainer_adapter.settings import ClientSettings


class Case:
    """One request as its caller sees it."""

    __slots__ = (
        "ask", "asked_at", "client", "deadline_at", "deltas", "ended_at", "outcomes", "was_aborted",
        "was_lost",
    )  # fmt: skip

    def __init__(self, client: "ClientNode", ask: Ask, deadline_s: float) -> None:
        self.client = client
        self.ask = ask
        self.asked_at = client.time.now
        self.deadline_at = self.asked_at + deadline_s
        self.ended_at = 0.0
        self.outcomes: list[Outcome] = []
        self.deltas: list[Delta] = []
        self.was_aborted = False
        self.was_lost = False
        """One of its executions was gone when it ended."""


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

    tick_s = 2 * TICK_S  # nobody waits for it, and each tick has its beat

    def __init__(self, name: str, net: MemoryNet, watch: ClientWatch, boot: int) -> None:
        super().__init__(name, net.time)
        self._net, self._watch = net, watch
        self._link: MemoryLink | None = None
        self._n_links = 0
        self.was_dismissed = False
        settings = ClientSettings(name=name, router=FRONT)
        chance = self.time.chance(f"{name}/{boot}")
        self.core = ClientCore(settings, f"{chance.getrandbits(128):032x}", chance)
        self.cases: dict[str, Case] = {}
        self._dead: set[tuple[str, Attempt]] = set()
        """Executions that this client was told are lost."""
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

    def abort(self, rid: str) -> None:
        """The caller has changed its mind."""
        if self.is_alive:
            self.cases[rid].was_aborted = True
            self._apply(self.core.abort([rid], self.time.now)[1])

    def kill(self) -> None:
        """As SIGKILL: nobody waits for its requests any more."""
        self.is_alive = False
        self._subscriber.close()
        if self._link is not None:
            self._link.close()

    def tick(self) -> None:
        """Time passes."""
        if not is_idle_client(self.core, self.time.now) or self.thawed_at == self.time.now:
            self._apply(self.core.tick(self.time.now))

    def _stream(self, entries: list[Entry]) -> None:
        self._apply(self.core.receive_stream(entries, self.time.now))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):  # by far the most
                if self._link is not None:
                    self._link.send(effect.entry)
                continue
            match effect:
                case Deliver(rid, delta):
                    self.cases[rid].deltas.append(delta)
                case Complete(rid, outcome):
                    self.cases[rid].outcomes.append(outcome)
                    self._watch.completed(self.cases[rid], rid)
                case Connect():
                    self._connect()
                case Stopped():
                    self.was_dismissed = True
                    self.kill()
                case Subscribe(endpoint):
                    self._subscriber.connect(endpoint)
                case Unsubscribe(endpoint):
                    self._subscriber.disconnect(endpoint)
                case _:
                    pass
        if self._link is not None:
            self._link.flush()

    def _connect(self) -> None:
        if self._link is not None:
            self._link.close()
        self._n_links += 1
        self._link = self._net.link(
            FRONT,
            self.name,
            partial(self.hear, self._from_router, self._n_links),
            partial(self.hear, self._link_down, self._n_links),
        )

    def _from_router(self, n_link: int, entries: list[Entry]) -> None:
        if n_link != self._n_links:
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
        alive = {entry.rid for entry, was_dead in endings if not was_dead}
        for entry, was_dead in endings:
            if was_dead and entry.rid not in alive and self._is_over(entry.rid):
                self._watch.took_dead(entry)

    def _is_over(self, rid: str) -> bool:
        case = self.cases.get(rid)
        return case is None or bool(case.outcomes)

    def _link_down(self, n_link: int) -> None:
        if n_link == self._n_links:
            self._apply(self.core.link_down(self.time.now))
