"""Draws conclusions from failures: workers that are left alone, requests that run alone.

Spec: docs/protocol.md, "Failing workers and poisonous requests".
"""

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.router.context import Context
from rolloutbus.router.health.breaker import Breaker
from rolloutbus.router.health.suspicion import DeadLetter, Suspicions
from rolloutbus.router.members.records import MemberRecord, Reason
from rolloutbus.router.requests.record import Request
from rolloutbus.router.requests.table import RequestTable

ENGINE_CRASHED = "engine_crashed"
"""The goodbye of a worker whose engine's process died by itself."""
ENGINE_KILLED = "engine_killed"
"""The goodbye of a worker whose engine's process was killed by somebody else."""
ENGINE_FAILED = "engine_failed"
"""The goodbye of a worker that gives up: its engine died by itself, and too often."""
_DEATHS = {
    ENGINE_CRASHED: "its engine crashed",
    ENGINE_KILLED: "its engine was killed",
    ENGINE_FAILED: "its engine died too often and is not started again",
}
CHARGED = frozenset({ENGINE_CRASHED, ENGINE_FAILED})
"""Goodbyes that are charged to the requests that ran."""
ENGINE_CODES = frozenset({ENGINE_FAILED, ENGINE_CRASHED, "internal"})
"""Problems of `failed` endings that are the worker's fault."""
BROKEN_WEIGHTS = "broken_weights"
"""The problem of a `failed` ending that is the fault of the worker's weights."""
POISON = Problem("poison", "The engine died each time this request ran, alone at last.", "failed")
KEPT_S = 600.0
"""The breaker of a worker that does not come back is forgotten after this."""
KEPT_MAX = 10_000
"""Breakers and dead letters remembered: peers choose the names."""
MAX_WHY = 200


class Health:
    """Breakers of the workers and suspicions of the requests."""

    def __init__(self, context: Context, table: RequestTable) -> None:
        self._context = context
        self._table = table
        self._breakers: dict[str, Breaker] = {}
        self.suspicions = Suspicions()
        self.is_watching = False
        """Anything is remembered at all; an attribute, because each request asks."""
        self.dead_letters: list[DeadLetter] = []
        """Poisonous requests that nobody has kept yet."""

    @property
    def is_calm(self) -> bool:
        """Whether no request waits, and no worker or request is watched."""
        return self._table.waiting.is_empty and not self.is_watching

    def worker_failed(
        self,
        name: str,
        now: float,
        why: str = "does not answer",
        *,
        is_final: bool = False,
        version: int | None = None,
    ) -> None:
        """A failure of the worker, or of the weights of `version` at it.

        A final one needs no others to trip its breaker.
        """
        breaker = self._breakers.get(name)
        if breaker is None:
            breaker = self._breakers[name] = Breaker(name, self._context.settings.breaker)
            if len(self._breakers) > KEPT_MAX:
                self._forget(next(iter(self._breakers.values())))
        self.is_watching = True
        if breaker.failed(now, is_final=is_final, version=version):
            self._context.count("breaker_opened")
        if breaker.state != "closed":
            self._context.troubled[name] = why[:MAX_WHY]
        self._apply(breaker)

    def judge(self, worker: MemberRecord) -> None:
        """Block or unblock the worker as its breaker says."""
        breaker = self._breakers.get(worker.name)
        is_tripped = breaker is not None and not breaker.takes_requests
        self._context.eligibility.note(worker, Reason.TRIPPED, is_blocking=is_tripped)

    def reported(self, worker: MemberRecord, now: float) -> None:
        """A worker says what ran when its engine died, maybe before this router began."""
        for rid, n_crashes, n_alone in worker.heartbeat.suspects:
            self.is_watching = True
            self.suspicions.reported(rid, worker.name, (n_crashes, n_alone), now)
            request = self._table.get(rid)
            if request is None or not request.is_waiting:
                continue
            if not request.is_suspect and self.suspicions.must_be_alone(rid):
                self._table.waiting.remove(request)
                request.is_suspect = True
                self._table.waiting.add(request)

    def admitted(self, request: Request) -> bool:
        """A request enters; False if it is known as poison and was answered so."""
        if self.suspicions.is_poison(request.rid):
            self._context.refuse(request.client, request.rid, POISON, "failed")
            return False
        request.is_suspect = self.suspicions.must_be_alone(request.rid)
        return True

    def placed(self, request: Request, worker: MemberRecord) -> None:
        """A worker got a request: the probe, if its breaker waits for one."""
        breaker = self._breakers.get(worker.name)
        if breaker is not None and breaker.state == "trying":
            breaker.probe = request.rid
            self._apply(breaker)

    def ended(self, worker: MemberRecord, entry: Entry, now: float) -> None:
        """The current attempt of a request came to an end at its worker."""
        code = _problem_code(entry) if entry.kind == "failed" else ""
        if code in ENGINE_CODES:
            self.worker_failed(worker.name, now, "its engine fails requests")
            return
        if code == BROKEN_WEIGHTS:
            why = f"its weights, version {worker.version}, are broken"
            self.worker_failed(worker.name, now, why, version=worker.version)
            return
        if entry.kind == "finished":
            self.suspicions.clear(entry.rid)
        breaker = self._breakers.get(worker.name)
        if breaker is not None and breaker.probe == entry.rid:
            if entry.kind == "finished":
                breaker.probe_succeeded()
            else:
                breaker.probe = ""
            self._apply(breaker)

    def member_lost(self, worker: MemberRecord, reason: str, now: float) -> None:
        """A lease ended; one that expired, and an engine that is gone, are failures."""
        code = code_of(reason)
        if code in CHARGED:
            self._charge(worker, now)
        elif code != ENGINE_KILLED and worker.expires_at > now:
            return
        self.worker_failed(worker.name, now, reason, is_final=code == ENGINE_FAILED)

    def tick(self, now: float) -> None:
        """Time passes: breakers let probes through, suspicions fade."""
        if not self.is_watching:
            return
        for breaker in list(self._breakers.values()):
            self._tick_breaker(breaker, now)
        self.suspicions.tick(now)
        blocked = self._context.eligibility.blocked()
        is_any_set_aside = any(Reason.SET_ASIDE in each.blocked_by for each in blocked)
        self.is_watching = bool(self._breakers or len(self.suspicions) or is_any_set_aside)

    def _charge(self, worker: MemberRecord, now: float) -> None:
        """Suspect what ran; what was only on its way there cannot have done it."""
        self.is_watching = True
        found = [self._table.get(rid) for rid in sorted(worker.requests)]
        requests = [each for each in found if each is not None and each.state == "running"]
        is_alone = len(requests) == 1
        suspicions = self.suspicions
        for request in requests:
            suspicions.charge(request.rid, now, worker=worker.name, is_alone=is_alone)
            was_isolated = Reason.SET_ASIDE in worker.blocked_by and request.is_suspect
            request.is_suspect = suspicions.must_be_alone(request.rid)
            if was_isolated and suspicions.is_proven(request.rid):
                self._condemn(request)

    def _condemn(self, request: Request) -> None:
        self.suspicions.condemn(request.rid)
        self._context.count("poisoned")
        letter = DeadLetter(request.rid, request.client, POISON.message, request.body)
        if len(self.dead_letters) < KEPT_MAX:
            self.dead_letters.append(letter)
        self._table.unload(request)
        request.advance("poisoned")
        self._context.refuse(request.client, request.rid, POISON, "failed")
        self._table.forget(request)

    def _tick_breaker(self, breaker: Breaker, now: float) -> None:
        worker = self._context.members.named(breaker.name)
        was_open = breaker.takes_requests
        breaker.tick(now)
        if breaker.probe and (worker is None or breaker.probe not in worker.requests):
            breaker.probe = ""  # aborted, expired or gone with its client: it told us nothing
        if breaker.takes_requests != was_open:
            self._apply(breaker)
        is_mended = worker is not None and breaker.blamed_version not in (None, worker.version)
        is_old = worker is None and now - breaker.failed_at > KEPT_S
        if breaker.is_idle or is_mended or is_old:
            self._forget(breaker)

    def _forget(self, breaker: Breaker) -> None:
        del self._breakers[breaker.name]
        self._context.troubled.pop(breaker.name, None)
        self._apply(breaker)

    def _apply(self, breaker: Breaker) -> None:
        worker = self._context.members.named(breaker.name)
        if worker is None:
            return
        was_tripped = Reason.TRIPPED in worker.blocked_by
        self.judge(worker)
        self._context.has_member_news |= was_tripped != (Reason.TRIPPED in worker.blocked_by)


def code_of(reason: str) -> str:
    """The part of a goodbye's reason that is for routers; the rest is for people."""
    return reason.partition(":")[0]


def engine_death(reason: str) -> str:
    """How a member's engine died, for people; empty if it said goodbye for another reason."""
    code, colon, words = reason.partition(":")
    return f"{_DEATHS[code]}{colon}{words}" if code in _DEATHS else ""


def told_reason(reason: str) -> str:
    """The reason of a loss for clients; the same for all crashes, because clients count them."""
    return ENGINE_CRASHED if code_of(reason) in CHARGED else reason


def _problem_code(entry: Entry) -> str:
    try:
        problem = unpack(entry)
    except RemoteProtocolError:
        return ENGINE_FAILED
    if not isinstance(problem, Problem) or problem.field == "lora":
        return ""  # no fault of the worker's
    return problem.code
