"""Engines that die for any reason: poison is found, innocents are not accused, workers return."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.endings import Lost, Problem
from rolloutbus.bus.wire.messages.generation import Abort
from rolloutbus.bus.wire.messages.membership import Goodbye
from rolloutbus.router.health.suspicion import ALONE_AT, POISON_AT
from rolloutbus.router.members.records import Reason
from tests.unit.router.harness import Bus, SimWorker

# pyright: reportPrivateUsage=false
# What a breaker has let through can only be judged from inside.

NAMES = ("w0", "w1", "w2")
MAX_OPEN = 12
MAX_DEATHS = ALONE_AT + POISON_AT
PATIENCE = 400
"""Rounds of half a second in which peace must bring everything to its end."""
LONG_S = 1e6
FAILED = Problem("engine_failed", "no", "failed")
ENDINGS = ("finished", "failed", "cancelled", "expired", "refused")

workers = st.sampled_from(NAMES)


class WorkerHealth(RuleBasedStateMachine):
    """Three workers and one client, who sends again whatever is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.bus = Bus()
        self.client = self.bus.client("c")
        self.workers = {name: self.bus.worker(name, slots=2) for name in NAMES}
        self.begun: dict[str, dict[str, Entry]] = {name: {} for name in NAMES}
        """What each engine runs."""
        self.open: set[str] = set()
        self.poison: set[str] = set()
        self.deaths: dict[str, int] = {}
        """Engines that a poisonous request has killed."""
        self.crashed_alone: dict[str, int] = {}
        """Crashes while nothing else ran."""
        self.before_trying: dict[str, set[str]] = {name: set() for name in NAMES}

    @precondition(lambda self: len(self.open) < MAX_OPEN)
    @rule(n_innocent=st.integers(1, 4), is_poison=st.booleans())
    def ask(self, n_innocent: int, is_poison: bool) -> None:
        rids = [self.client.generate(deadline_s=LONG_S) for _ in range(n_innocent + is_poison)]
        self.open.update(rids)
        self.poison.update(rids[:is_poison])
        self._client_reads()

    @rule()
    def engines_begin(self) -> None:
        for name, worker in self.workers.items():
            commands = worker.take("generate")
            fresh = [each for each in commands if each.epoch == worker.epoch]
            if fresh:
                worker.accept(*fresh)
                self.begun[name].update({each.rid: each for each in fresh})
        self._client_reads()

    @rule(name=workers, problem=st.sampled_from([None, FAILED]))
    def engine_ends_one(self, name: str, problem: Problem | None) -> None:
        innocent = next((rid for rid in self.begun[name] if rid not in self.poison), None)
        if innocent is not None:
            kind = "failed" if problem else "finished"
            self.workers[name].end(self.begun[name].pop(innocent), kind, problem)
        self._client_reads()

    @rule()
    def poison_works(self) -> None:
        for name in NAMES:
            guilty = self.poison & self.begun[name].keys()
            for rid in guilty:
                self.deaths[rid] = self.deaths.get(rid, 0) + 1
            if guilty:
                self._dies(name, "engine_crashed")

    @rule(reason=st.sampled_from(["engine_crashed", "engine_killed", "engine_failed: again"]))
    def every_busy_engine_dies_by_chance(self, reason: str) -> None:
        for name in NAMES:
            if self.begun[name]:
                self._dies(name, reason)

    @rule(name=workers)
    def worker_is_cut_off(self, name: str) -> None:
        self.workers[name].is_alive = False
        self.time_passes(4)
        self.workers[name].is_alive = True
        self._comes_back(name)

    @rule(seconds=st.sampled_from([1, 4, 11]))
    def time_passes(self, seconds: float) -> None:
        self.bus.advance(seconds)
        self._client_reads()

    @rule(data=st.data())
    def client_asks_again(self, data: st.DataObject) -> None:
        if self.open:
            rid = data.draw(st.sampled_from(sorted(self.open)))
            self.client.submit(rid, LONG_S, resend=True)
        self._client_reads()

    @rule(data=st.data())
    def client_gives_up(self, data: st.DataObject) -> None:
        if self.open:
            rid = data.draw(st.sampled_from(sorted(self.open)))
            self.client.ask("abort", Abort([rid]))
            for name in NAMES:
                command = self.begun[name].pop(rid, None)
                if command is not None:
                    self.workers[name].end(command, "cancelled")
        self._client_reads()

    @invariant()
    def at_most_one_probe_is_under_way(self) -> None:
        breakers = self.bus.core._health._breakers
        for name in NAMES:
            record = self.bus.core.context.members.named(name)
            running = set(record.requests) if record is not None else set[str]()
            breaker = breakers.get(name)
            if breaker is None or breaker.state != "trying":
                self.before_trying[name] = running
            else:
                assert len(running - self.before_trying[name]) <= 1

    @invariant()
    def poison_has_its_limit(self) -> None:
        assert all(n <= MAX_DEATHS for n in self.deaths.values())

    def teardown(self) -> None:
        for _ in range(PATIENCE):
            self.engines_begin()
            self.poison_works()
            for name in NAMES:
                self.engine_ends_one(name, None)
            self.time_passes(0.5)
            self.at_most_one_probe_is_under_way()
            self.poison_has_its_limit()
            if not self.open:
                break
        assert not self.open, "peace, and requests without an ending"
        self.time_passes(1)
        records = [self.bus.core.context.members.named(name) for name in NAMES]
        assert not any(
            record is None or Reason.SET_ASIDE in record.blocked_by for record in records
        )

    def _dies(self, name: str, reason: str) -> None:
        worker = self.workers[name]
        if reason != "engine_killed" and len(self.begun[name]) == 1:
            (rid,) = self.begun[name]
            self.crashed_alone[rid] = self.crashed_alone.get(rid, 0) + 1
        worker.say(Entry("goodbye", epoch=worker.epoch, body=pack(Goodbye(reason))))
        self._comes_back(name)

    def _comes_back(self, name: str) -> None:
        worker: SimWorker = self.workers[name]
        worker.running.clear()
        worker.take("generate")
        self.begun[name].clear()
        worker.lease_no += 1
        worker.hello()
        worker.heartbeat()
        self._client_reads()

    def _client_reads(self) -> None:
        while lost := self.client.take("lost"):
            for entry in lost:
                body = unpack(entry)
                assert isinstance(body, Lost)
                for rid, _ in body.items:
                    if rid in self.open:
                        self.client.submit(rid, LONG_S, resend=True)
            self._read_endings()
        self._read_endings()

    def _read_endings(self) -> None:
        for ending in self.client.take(*ENDINGS):
            if ending.route:
                self.client.acknowledge(ending)
            if ending.rid not in self.open:
                continue
            self.open.discard(ending.rid)
            body = unpack(ending) if ending.kind == "failed" else None
            if isinstance(body, Problem) and body.code == "poison":
                assert self.crashed_alone.get(ending.rid, 0) >= POISON_AT


class TestWorkerHealth(WorkerHealth.TestCase):
    settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
