"""Draws conclusions from failures: workers that are left alone, requests that run alone.

Spec: docs/protocol.md, "Failing workers and poisonous requests".
"""

from bus.codec import unpack
from bus.entry import Entry
from bus.errors import RemoteProtocolError
from bus.messages.endings import Problem
from router.breaker import Breaker
from router.context import Context
from router.dead_letter import DeadLetter
from router.isolation import Isolation
from router.members import MemberRecord
from router.requests import Request
from router.suspicion import Suspicions
from router.table import RequestTable

ENGINE_CRASHED = "engine_crashed"
"""The goodbye of a worker whose engine's process died."""
ENGINE_CODES = frozenset({"engine_failed", ENGINE_CRASHED, "internal"})
"""Problems of `failed` endings that are the worker's fault."""
POISON = Problem("poison", "The engine died each time this request ran, alone at last.", "failed")


class Health:
    """Breakers of the workers, suspicions of the requests, and the isolation lane."""

    def __init__(self, context: Context, table: RequestTable) -> None:
        self._context = context
        self._table = table
        self._breakers: dict[str, Breaker] = {}
        self._suspicions = Suspicions()
        self.isolation = Isolation(context, table.placer)
        self.is_watching = False
        """Anything is remembered at all; an attribute, because each request asks."""
        self._dead: list[DeadLetter] = []

    def worker_failed(self, name: str, now: float) -> None:
        """A failure that is the worker's own."""
        breaker = self._breakers.get(name)
        if breaker is None:
            breaker = self._breakers[name] = Breaker(name, self._context.settings.breaker)
        self.is_watching = True
        if breaker.failed(now):
            self._context.count("breaker_opened")
        self._apply(breaker)

    def judge(self, worker: MemberRecord) -> None:
        """Note on the worker's record what its breaker says."""
        breaker = self._breakers.get(worker.name)
        worker.is_tripped = breaker is not None and not breaker.takes_requests

    def admitted(self, request: Request) -> bool:
        """A request enters; False if it is known as poison and was answered so."""
        if self._suspicions.is_poison(request.rid):
            self._context.refuse(request.client, request.rid, POISON, "failed")
            return False
        request.is_suspect = self._suspicions.must_be_alone(request.rid)
        return True

    def placed(self, request: Request, worker: MemberRecord) -> None:
        """A worker got a request: the probe, if its breaker waits for one."""
        breaker = self._breakers.get(worker.name)
        if breaker is not None and breaker.state == "trying":
            breaker.probe = request.rid
            self._apply(breaker)

    def ended(self, worker: MemberRecord, entry: Entry, now: float) -> None:
        """The current attempt of a request came to an end at its worker."""
        if entry.kind == "failed" and _is_engine_fault(entry):
            self.worker_failed(worker.name, now)
            return
        if entry.kind == "finished":
            self._suspicions.clear(entry.rid)
        breaker = self._breakers.get(worker.name)
        if breaker is not None and breaker.probe == entry.rid:
            if entry.kind == "finished":
                breaker.probe_succeeded()
            else:
                breaker.probe = ""
            self._apply(breaker)

    def member_lost(self, worker: MemberRecord, reason: str, now: float) -> None:
        """A lease ended; a lease that expired, and an engine that crashed, are failures."""
        if reason == ENGINE_CRASHED:
            self._charge(worker, now)
        elif worker.expires_at > now:
            return
        self.worker_failed(worker.name, now)

    def tick(self, now: float) -> None:
        """Time passes: breakers let probes through, suspicions fade, set-aside workers return."""
        if not self.is_watching:
            return
        for breaker in list(self._breakers.values()):
            self._tick_breaker(breaker, now)
        self._suspicions.tick(now)
        waiting = {each.place.policy for each in self._table.waiting if each.is_suspect}
        self.isolation.tick(waiting)
        is_calm = not self._breakers and not len(self._suspicions)
        self.is_watching = not is_calm or not self.isolation.is_idle

    def take_dead_letters(self) -> list[DeadLetter]:
        """Poisonous requests since the last call."""
        dead, self._dead = self._dead, []
        return dead

    def _charge(self, worker: MemberRecord, now: float) -> None:
        self.is_watching = True
        found = [self._table.get(rid) for rid in sorted(worker.requests)]
        requests = [each for each in found if each is not None]
        if worker.is_set_aside and len(requests) == 1 and requests[0].is_suspect:
            self._condemn(requests[0], now)
            return
        for request in requests:
            self._suspicions.charge(request.rid, now)
            request.is_suspect = self._suspicions.must_be_alone(request.rid)

    def _condemn(self, request: Request, now: float) -> None:
        self._suspicions.condemn(request.rid, now)
        self._context.count("poisoned")
        letter = DeadLetter(request.rid, request.client, POISON.message, request.body)
        self._dead.append(letter)
        self._table.unload(request)
        request.advance("poisoned")
        self._table.forget(request)
        self._context.refuse(request.client, request.rid, POISON, "failed")

    def _tick_breaker(self, breaker: Breaker, now: float) -> None:
        worker = self._context.members.named(breaker.name)
        was_open = breaker.takes_requests
        breaker.tick(now)
        if breaker.probe and (worker is None or breaker.probe not in worker.requests):
            breaker.probe = ""  # aborted, expired or gone with its client: it told us nothing
        if breaker.takes_requests != was_open:
            self._apply(breaker)
        if breaker.is_idle:
            del self._breakers[breaker.name]

    def _apply(self, breaker: Breaker) -> None:
        worker = self._context.members.named(breaker.name)
        if worker is None:
            return
        was_tripped = worker.is_tripped
        self.judge(worker)
        if worker.is_tripped != was_tripped:
            self._table.placer.update(worker, is_serving=self._context.is_serving(worker))
            self._context.has_member_news = True


def _is_engine_fault(entry: Entry) -> bool:
    try:
        problem = unpack(entry)
    except RemoteProtocolError:
        return True
    return isinstance(problem, Problem) and problem.code in ENGINE_CODES
