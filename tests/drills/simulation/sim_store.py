"""A simulated weight store: it keeps only its promises, membership and the record of commits."""

from dataclasses import dataclass, field
from functools import partial

import msgspec

from rolloutbus.bus.actor.effects import Connect, Send, Stop
from rolloutbus.bus.membership.core import MemberCore, MemberIdentity
from rolloutbus.bus.membership.deliveries import Execute, Heed, MemberEffect
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.bus.wire.messages.membership import Intent, StoreFacts
from rolloutbus.bus.wire.messages.weights import RecordCommit, Settled, SettleVersion
from rolloutbus.engine_worker.worker.controller import key_of
from tests.drills.simulation.memory_ports import MemoryNet
from tests.drills.simulation.peeks import is_idle_member
from tests.drills.simulation.process import BACK, TICK_S, Process
from tests.drills.simulation.sim_host import STORES_HOST
from tests.drills.simulation.sim_link import SimLink
from tests.drills.simulation.watch import Watch


@dataclass(slots=True)
class Record:
    """What a store has written down: it outlives the process."""

    committed: dict[str, int] = field(default_factory=dict[str, int])
    waves: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    intent: Intent | None = None

    def write(self, body: RecordCommit) -> None:
        """As a real store does."""
        policy, before = body.policy, self.committed.get(body.policy, 0)
        if body.version > before:
            self.committed[policy] = body.version
            self.waves.pop(policy, None)
            if body.floor:
                self.waves[policy] = (before, body.floor)
        elif body.version == before and not body.floor:
            self.waves.pop(policy, None)


class StoreNode(Process):
    """A store process; what it wrote down outlives it."""

    tick_s = 2 * TICK_S  # nobody waits for it, and each tick has its heartbeat

    def __init__(
        self,
        net: MemoryNet,
        watch: Watch,
        boot: int,
        record: Record,
        answer_s: float = 0.0,
        router: str = BACK,
    ) -> None:
        """`answer_s`: how long after a commit was written it is answered."""
        super().__init__("store", net.time)
        self._answer_s = answer_s
        self._watch = watch
        self._link = SimLink(self, net, router, self._from_router, self._link_down)
        self._record = record
        chance = self.time.chance(f"store/{boot}")
        identity = MemberIdentity("store", "store", f"5{boot:031x}")
        self.member = MemberCore(identity, LeaseSettings(), chance, intent=record.intent)
        bulk = "ipc:///sim/bulk"
        facts = StoreFacts(bulk, record.committed, STORES_HOST, waves=record.waves)
        self._apply(self.member.online(facts, self.time.now))
        self.start_ticking(chance.random())

    def kill(self) -> None:
        """As SIGKILL; the record stays."""
        self.is_alive = False
        self._link.close()

    def tick(self) -> None:
        """Time passes."""
        if not is_idle_member(self.member, self.time.now) or self.thawed_at == self.time.now:
            self._apply(self.member.tick(self.time.now))

    def _apply(self, effects: list[MemberEffect]) -> None:
        now = self.time.now
        if effects:
            effects += self._executed(effects, now)
        effects += self.member.flush(now)
        for effect in effects:
            match effect:
                case Send(_, entry):
                    self._link.send(entry)
                case Connect(n_lost):
                    self._link.connect(n_lost)
                case Heed(intent):
                    self._record.intent = intent
                case Stop():
                    self.kill()
                case _:
                    pass
        self._link.flush()

    def _executed(self, effects: list[MemberEffect], now: float) -> list[MemberEffect]:
        """Every command is done at once; the only one with a memory is `record_commit`."""
        found: list[MemberEffect] = []
        for effect in effects:
            if isinstance(effect, Execute):
                entry = effect.entry
                body = unpack(entry)
                if isinstance(body, RecordCommit) and self._answer_s:
                    self._write(body)
                    self.time.later(self._answer_s, partial(self.hear, self._answer, entry))
                    continue
                if isinstance(body, RecordCommit):
                    self._write(body)
                found += self.member.ended("finished", key_of(entry), self._result(body), now)
        return found

    def _answer(self, entry: Entry) -> None:
        self._apply(self.member.ended("finished", key_of(entry), Done(), self.time.now))

    def _write(self, body: RecordCommit) -> None:
        self._record.write(body)
        self._watch.fleet.recorded(body.version)
        self._watch.fleet.update_reached("recorded", self.name)

    def _result(self, body: object) -> msgspec.Struct:
        """A trainer here publishes the same version again: none is ever withdrawn."""
        if isinstance(body, SettleVersion):
            return Settled(self._record.committed.get(body.policy, 0) >= body.version)
        return Done()

    def _from_router(self, entries: list[Entry]) -> None:
        effects = self.member.receive(entries, self.time.now)
        if effects or entries[0].kind != "lease" or len(entries) > 1:
            self._apply(effects)

    def _link_down(self) -> None:
        self._apply(self.member.link_down(self.time.now))
