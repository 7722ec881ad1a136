"""A simulated client process: the shipped client core, and a record of what its callers saw."""

from bus.codec import topic_of
from bus.effects import Connect, Send
from bus.entry import Entry
from bus.memory_ports import MemoryLink, MemoryNet
from bus.testing import VirtualTime
from tests.simulation.nodes import FRONT, Node
from trainer_adapter.client_core import ClientCore
from trainer_adapter.effects import Complete, Deliver, Effect, Outcome, Subscribe, Unsubscribe
from trainer_adapter.requests import Ask
from trainer_adapter.rollout import Delta
from trainer_adapter.settings import ClientSettings


class ClientNode(Node):
    """One client."""

    def __init__(self, name: str, net: MemoryNet, time: VirtualTime) -> None:
        super().__init__(name, time)
        self._net = net
        self._link: MemoryLink | None = None
        settings = ClientSettings(name=name, router=FRONT)
        boot = f"{time.chance(name).getrandbits(128):032x}"
        self.core = ClientCore(settings, boot, time.chance(f"{name}/core"))
        self.asked: dict[str, Ask] = {}
        self.outcomes: dict[str, list[Outcome]] = {}
        self.deltas: dict[str, list[Delta]] = {}

        def hear_stream(_: bytes, entries: list[Entry]) -> None:
            self.guarded(lambda: self._apply(self.core.receive_stream(entries, self.time.now)))

        self._subscriber = net.subscriber(name, hear_stream, [topic_of(name)])
        self._apply(self.core.start(time.now))
        self.ticking(lambda: self._apply(self.core.tick(self.time.now)))

    def ask(self, ask: Ask, deadline_s: float) -> str:
        """Submit a request; returns its rid."""
        rid, effects = self.core.submit(ask, deadline_s, self.time.now)
        self.asked[rid] = ask
        self._apply(effects)
        return rid

    def abort(self, rid: str) -> None:
        """Change one's mind."""
        self._apply(self.core.abort([rid], self.time.now)[1])

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(_, entry):
                    if self._link is not None:
                        self._link.send(entry)
                case Connect():
                    self._connect()
                case Subscribe(endpoint):
                    self._subscriber.connect(endpoint)
                case Unsubscribe(endpoint):
                    self._subscriber.disconnect(endpoint)
                case Deliver(rid, delta):
                    self.deltas.setdefault(rid, []).append(delta)
                case Complete(rid, outcome):
                    self.outcomes.setdefault(rid, []).append(outcome)
                case _:
                    pass

    def _connect(self) -> None:
        if self._link is not None:
            self._link.close()

        def receive(entries: list[Entry]) -> None:
            self.guarded(lambda: self._apply(self.core.receive(entries, self.time.now)))

        def down() -> None:
            self.guarded(lambda: self._apply(self.core.link_down(self.time.now)))

        self._link = self._net.link(FRONT, self.name, receive, down)
