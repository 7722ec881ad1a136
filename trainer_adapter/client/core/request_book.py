"""Every open request of one client: sent, re-sent, resumed, aborted, and ended exactly once.

Spec: docs/protocol.md, "Commands".
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from rolloutbus.bus.actor.effects import THE_LINK, Send
from rolloutbus.bus.backoff import Chance, wait_after
from rolloutbus.bus.timetable import Timetable
from rolloutbus.bus.wire.entry import Attempt
from rolloutbus.bus.wire.errors import (
    ActorStopped,
    BusError,
    DeadlineExceeded,
    DeliveryError,
    MailboxFull,
    Refused,
)
from rolloutbus.bus.wire.limits import MAX_BODY_BYTES
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Abort
from rolloutbus.bus.wire.outgoing import seconds_of
from rolloutbus.trainer_adapter.client.core.acks import Acks, Released
from rolloutbus.trainer_adapter.client.core.effects import ClientCounters, Complete, Effect, Outcome
from rolloutbus.trainer_adapter.client.core.endings import aborted, cancelled, error_of
from rolloutbus.trainer_adapter.client.core.known_fleet import KnownFleet
from rolloutbus.trainer_adapter.client.core.link import RouterLink
from rolloutbus.trainer_adapter.client.core.requests import Ask, OpenRequest, sealed_ask
from rolloutbus.trainer_adapter.client.core.retry_budget import RetryBudget
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings

Duty = Literal["resend", "deadline", "overdue", "abort"]
Then = Callable[[Outcome, float], None]
Ended = Callable[[msgspec.Struct, Outcome], None]

INTERNAL_DEADLINE_S = 5.0
"""Deadline of commands that the core sends by itself."""
MUTE_S = 5.0
"""A running request of which neither worker nor router has said anything for this long is sent
again; workers list what they run five times a second."""

RANDOM_BYTES = 16
"""Random bytes in each rid, besides a counter: they make rids impossible to guess."""

MAX_ENDED = 1024
"""Number of ended requests that are remembered."""


@dataclass(slots=True)
class ClientContext:
    """What the parts of one client's core share."""

    settings: ClientSettings
    link: RouterLink
    fleet: KnownFleet
    chance: Chance
    counters: ClientCounters
    out: list[Effect]


class RequestBook:
    """Requests by rid, and when something must be done about each."""

    def __init__(self, desk: ClientContext, boot: str, on_end: Ended) -> None:
        """`boot` is a random 128-bit hex name of this process's client.

        `on_end` hears the body and the outcome of every command of the caller, however it ended.
        """
        self._on_end = on_end
        self._desk = desk
        self._settings = desk.settings
        self._counters = desk.counters
        self._n = 0
        self._rid_key = hashlib.blake2b(boot.encode(), digest_size=32, person=b"rids").digest()
        self._due: Timetable[tuple[Duty, str]] = Timetable()
        self._then: dict[str, Then] = {}
        self._budget = RetryBudget()
        self.acks = Acks(desk.out)
        self.open: dict[str, OpenRequest] = {}
        self._held_back: set[str] = set()
        """Requests to send once the router has named its fleet."""
        self.released = Released(desk.settings.max_open)
        self._ended: dict[str, None] = {}
        """The latest that are over: whoever names one of them has made no mistake."""

    def add(self, ask: Ask, deadline_s: float, now: float, then: Then | None = None) -> OpenRequest:
        """Open a request and send it if the link is up.

        What cannot be sent is found before the request is kept: nothing can fail later.

        Raises:
            MailboxFull: too many are open.
            Refused: a field has a wrong type or size; or an `attach` to what this client waits for
                already.
        """
        deadline_at = now + seconds_of(deadline_s)
        ask, packed = sealed_ask(ask)
        if ask.rid and self.acks.is_over(ask.rid):
            message = "an earlier call of this client got its result or its error"
            message += "; no worker holds it any more"
            raise Refused(Problem("unknown_request", message, "not_started", field="rid"))
        if ask.rid in self.open:
            raise Refused(Problem("duplicate_rid", "this client waits for it", "not_started"))
        if len(self.open) >= self._settings.max_open and then is None:
            raise MailboxFull(f"{len(self.open)} requests are open; wait for some of them")
        rid = ask.rid or self._new_rid()
        self.released.discard(rid)
        request = OpenRequest(rid, ask, deadline_at, packed=packed)
        self.open[rid] = request
        if then is not None:
            self._then[rid] = then
        self._due.set(("deadline", rid), request.deadline_at)
        self._budget.first_sent(now)
        self._send(request, now)
        return request

    def relinked(self, now: float, first: Iterable[tuple[Ask, Then]] = ()) -> None:
        """A router has welcomed us: tell it everything again, after `first`, our own commands."""
        self._held_back.clear()
        requests = list(self.open.values())
        self._tell_again(requests, first, now)
        orphans = [request.rid for request in requests if request.abort_since is not None]
        if orphans:
            self._send_abort(orphans, now)

    def send_held(self, now: float, first: Iterable[tuple[Ask, Then]]) -> None:
        """The router has named its fleet: send what waited for that, after `first`."""
        requests = [request for rid, request in self.open.items() if rid in self._held_back]
        self._held_back.clear()
        self._tell_again(requests, first, now)

    def queued(self, rids: Iterable[str]) -> None:
        """Marks requests as queued at the router: the client need not send them again."""
        for rid in rids:
            request = self.open.get(rid)
            if request is None or request.state == "deferred":
                continue
            if request.advance("queued") == "queued":  # one that runs is watched as before
                self._due.cancel(("resend", rid))

    def accepted(self, rid: str, attempt: Attempt, worker: str, now: float) -> OpenRequest | None:
        """Records that a worker runs the request; returns None if the execution does not count."""
        request = self.open.get(rid)
        if request is None or not request.saw(attempt, worker):
            return None
        request.heard_at = now
        if request.state != "running" and request.advance("accepted") == "running":
            self._due.set(("resend", rid), now + MUTE_S)
        return request

    def go_on(self, request: OpenRequest, now: float) -> None:
        """Sends a request again after its execution ended: with the held tokens, or anew."""
        request.advance("lost")
        request.may_run = False
        if not request.may_resume or not request.assembly.n_tokens:
            request.assembly.begin(0)
            self._counters.retried += 1
        else:
            self._counters.resumed += 1
        self._send(request, now)

    def defer(self, request: OpenRequest, problem: Problem, now: float) -> None:
        """No worker was ready for it: send it again a little later."""
        settings = self._settings
        request.advance("deferred")
        request.may_run = False
        request.refusal = problem
        self._counters.deferred += 1
        request.n_tries += 1
        bound_s = wait_after(request.n_tries, settings.defer_first_s, settings.defer_max_s)
        wait_s = max(problem.retry_after_ms / 1000, bound_s) * (0.5 + self._desk.chance.random())
        self._due.set(("resend", request.rid), now + wait_s)

    def doubt(self, request: OpenRequest, now: float) -> None:
        """A restarted router may have mistaken an old ending for this request's: sends it again."""
        if request.state in ("sent", "queued"):
            request.may_run = True
            request.advance("relinked")
            self._due.set(("resend", request.rid), now + self._settings.lease.resend_first_s)

    def abort(self, rids: Iterable[str] | None, now: float) -> int:
        """Stop generates (None: all) and updates; each still gets its own ending. How many."""
        told: list[str] = []
        n_aborted = 0
        for rid in list(self.open) if rids is None else rids:
            request = self.open.get(rid)
            if request is None or not request.may_be_aborted(by_name=rids is not None):
                continue
            n_aborted += 1
            if request.is_held_here:
                self.end(request, aborted(request), now)
            else:
                told.append(rid)
        if told:
            self._send_abort(told, now)
        return n_aborted

    def abort_policy(self, policy: str, now: float) -> None:
        """Somebody who may has stopped this policy's generates, those of every client."""
        places = ((rid, request.ask.place) for rid, request in self.open.items())
        self.abort([rid for rid, place in places if place and place.policy == policy], now)

    def unknown(self, rids: Iterable[str]) -> list[str]:
        """Returns the rids that are neither open nor among the lately ended ones."""
        return [rid for rid in rids if rid not in self.open and rid not in self._ended]

    def release(self, rid: str) -> bool:
        """The caller no longer waits; returns True if the request is detached and continues."""
        request = self.open.get(rid)
        if request is None or not request.ask.is_detached:
            return False
        self._leave(request)
        self.released.add(rid)
        return True

    def end(self, request: OpenRequest, outcome: Outcome, now: float) -> None:
        """Ends the request for its caller."""
        self._leave(request)
        if request.ask.is_detached and _is_over(outcome):
            self.acks.over(request.rid, now)
        then = self._then.pop(request.rid, None)
        if then is not None:
            then(outcome, now)
            return
        self._on_end(request.ask.body, outcome)
        if not isinstance(outcome, BusError):
            self._counters.finished += 1
        self._desk.out.append(Complete(request.rid, outcome))

    def _leave(self, request: OpenRequest) -> None:
        request.advance("ended")
        del self.open[request.rid]
        self._held_back.discard(request.rid)
        self._ended[request.rid] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        for duty in ("resend", "deadline", "overdue"):
            self._due.cancel((duty, request.rid))
        if request.abort_since is not None:
            self._due.cancel(("abort", request.rid))

    def end_all(self, error: BusError, now: float) -> None:
        """Nothing will come any more."""
        for request in list(self.open.values()):
            self.end(request, error, now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        aborts: list[str] = []
        for duty, rid in self._due.due(now):
            request = self.open.get(rid)
            if request is None:
                continue
            if duty == "resend":
                self._resend(request, now)
            elif duty == "abort":
                self._repeat_abort(request, aborts, now)
            else:
                self._overdue(request, now, is_final=duty == "overdue")
        if aborts:
            self._send_abort(aborts, now)
        if self._desk.link.is_up:
            self.acks.flush()

    def _tell_again(
        self, requests: list[OpenRequest], first: Iterable[tuple[Ask, Then]], now: float
    ) -> None:
        for ask, then in first:
            self.add(ask, INTERNAL_DEADLINE_S, now, then)
        for request in requests:
            request.may_run |= request.state in ("sent", "queued", "running")
            request.advance("relinked")
            if request.is_wanted:
                self._send(request, now)

    def _new_rid(self) -> str:
        """Never used before, by an earlier process of this name neither, and not to be guessed."""
        self._n += 1
        counted = self._n.to_bytes(8, "big")
        drawn = hashlib.blake2b(counted, digest_size=RANDOM_BYTES, key=self._rid_key).digest()
        return f"{self._settings.name}/{int.from_bytes(counted + drawn, 'big')}"

    def _send(self, request: OpenRequest, now: float) -> None:
        """Send it (again), if the link is up."""
        if not self._desk.link.is_up:
            return
        if self._desk.fleet.holds_back(request):
            if request.rid not in self._held_back:
                self._held_back.add(request.rid)
                self._counters.held_back += 1
            return
        if request.owes_retry:
            wait_s = self._budget.wait_s(now)
            if wait_s > 0:
                self._due.set(("resend", request.rid), now + wait_s)
                return
            request.owes_retry = False
        if request.dead_attempts or request.ask.kind == "list_detached":
            # The router must see what ended before it sees the same rid again, or names it.
            self.acks.flush()
        request.n_sent = request.n_sent + 1 if request.state == "sent" else 1
        entry = request.entry(now, has_marks=self._desk.link.wants_marks)
        if len(entry.body) > MAX_BODY_BYTES:  # the router would hang up, for all other requests too
            self.end(request, _too_large(request, len(entry.body)), now)
            return
        self._desk.out.append(Send(THE_LINK, entry))
        request.advance("sent")
        request.was_sent = True
        self._due.set(
            ("resend", request.rid), now + self._settings.lease.resend_after(request.n_sent)
        )

    def _resend(self, request: OpenRequest, now: float) -> None:
        if request.state == "running":
            silent_until = request.heard_at + MUTE_S
            if now < silent_until or not self._desk.link.is_up:
                self._due.set(("resend", request.rid), max(silent_until, now + MUTE_S / 2))
                return
            # Nobody speaks of it any more: the word that it is lost may be lost itself.
            request.may_run = True
            request.advance("relinked")
            self._counters.resends += 1
        if request.state == "sent" and self._desk.link.is_up:
            self._counters.resends += 1
        if request.is_wanted and now < request.deadline_at:
            self._send(request, now)

    def _overdue(self, request: OpenRequest, now: float, *, is_final: bool) -> None:
        """Ends a request at its deadline if only this client has it; others wait a moment."""
        if request.is_held_here and request.rid in self._held_back:
            self.end(request, self._no_ending(request), now)
        elif request.is_held_here and request.refusal is not None:
            self.end(request, error_of("refused", request.refusal, request.rid), now)
        elif request.is_held_here:
            self.end(request, _not_taken(request), now)
        elif not is_final:
            self._due.set(("overdue", request.rid), now + self._settings.overtime_s)
        else:
            self.end(request, self._no_ending(request), now)
            if request.ask.is_detached:
                self.released.add(request.rid)
            elif request.is_generate:
                self._send_abort([request.rid], now)

    def _no_ending(self, request: OpenRequest) -> DeadlineExceeded:
        kind = request.ask.kind
        if request.rid not in self._held_back or request.state == "running":
            return DeadlineExceeded(f"{kind}: no ending in time")
        return DeadlineExceeded(
            f"{kind}: held back until its deadline. It belongs to fleet {self._desk.fleet.name}, "
            "and the router at the address has not said which fleet it serves",
            outcome=None if request.was_sent else "not_started",
        )

    def _repeat_abort(self, request: OpenRequest, aborts: list[str], now: float) -> None:
        since = request.abort_since or now
        if not request.is_wanted and now - since > self._settings.abort_patience_s:
            self.end(request, cancelled(request, None), now)
        else:
            aborts.append(request.rid)

    def _send_abort(self, rids: list[str], now: float) -> None:
        for rid in rids:
            request = self.open.get(rid)
            if request is not None:
                request.abort_since = now if request.abort_since is None else request.abort_since
                self._due.set(("abort", rid), now + self._settings.lease.resend_first_s)
        if self._desk.link.is_up:
            self.add(Ask("abort", Abort(rids)), INTERNAL_DEADLINE_S, now, _nothing)


def _is_over(outcome: Outcome) -> bool:
    """Whether this outcome ends a detached request itself, and not only its caller's wait."""
    is_unknown = isinstance(outcome, Refused) and outcome.code == "unknown_request"
    return not is_unknown and not isinstance(outcome, DeliveryError | ActorStopped)


def _not_taken(request: OpenRequest) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"{request.ask.kind}: no router took it before its deadline",
        outcome=None if request.was_sent else "not_started",
    )


def _too_large(request: OpenRequest, size_bytes: int) -> Refused:
    why = f"{request.ask.kind} has {size_bytes} bytes; at most {MAX_BODY_BYTES} are allowed"
    return Refused(Problem("bad_request", why, "not_started"), rid=request.rid)


def _nothing(outcome: Outcome, now: float) -> None:
    """Ignores the ending of an internal command."""
    del outcome, now
