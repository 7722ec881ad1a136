"""Clients that come back for their detached requests, and requests that wait for such a client.

Spec: docs/protocol.md, "Detached requests".
"""

from collections.abc import Callable
from typing import NamedTuple

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import NO_BODY, Entry
from rolloutbus.bus.wire.messages.endings import Accepted
from rolloutbus.bus.wire.messages.generation import DetachedList, DetachedRequest
from rolloutbus.router.context import Context, refusal
from rolloutbus.router.members.clients import ClientRecord
from rolloutbus.router.requests.record import Request
from rolloutbus.router.requests.table import RequestTable

GIVEN_UP_AFTER = 2
"""Longest waits between two sendings: a process that lives has sent again by then what it still
wants. What it gave up it never sends."""


class _Reported(NamedTuple):
    request: Request
    at: float
    boot: str
    """Of the process to which the loss was reported: another one of its name knows nothing."""
    seen_at: float
    """When that process was heard last before."""


class Reattachment:
    """Answers `list_detached` and `attach`, and keeps lost requests until their client cares."""

    def __init__(self, context: Context, table: RequestTable) -> None:
        self._context = context
        self._table = table
        self._reported: dict[str, _Reported] = {}

    def reported_lost(self, request: Request) -> None:
        """The loss was reported to its client just now, which should send it again."""
        client = self._context.clients.named(request.client)
        if client is not None and request.body != NO_BODY and not self._context.detached.is_full:
            at = self._context.detached.now
            self._reported[request.rid] = _Reported(request, at, client.boot, client.seen_at)

    def may_run(self, rid: str) -> bool:
        """Whether its loss was reported while its worker, which is not heard, may still run it."""
        reported = self._reported.get(rid)
        return reported is not None and reported.request.may_run_elsewhere

    def list_detached(self, client: ClientRecord, entry: Entry, _now: float) -> None:
        """Name what is known; while workers may still report more, the client asks again."""
        if not self._context.is_recovering:
            found = self._context.detached.listed(client.name)
            found += [
                DetachedRequest(rid, "waiting", each.request.place.group, in_doubt=True)
                for rid, each in self._reported.items()
                if each.request.client == client.name and not self._is_settled(rid)
            ]
            # By the number in the rid: as they were asked for. Workers may name what is none.
            found.sort(key=lambda each: (len(each.rid), each.rid))
            self._context.finish(client.name, entry.rid, pack(DetachedList(found)))

    def attach(self, client: ClientRecord, entry: Entry, _now: float) -> None:
        """Follow a request over this connection from now on."""
        context, rid = self._context, entry.rid
        is_in_doubt = self._settle(rid, client)
        request = context.detached.requests.get(rid)
        unheard = context.detached.unheard(rid, client.name)
        if request is not None and request.client == client.name:
            context.detached.follow(rid, client.peer, has_prompt=False)
            self._answer(client, request, entry)
        elif unheard is not None:
            body = NO_BODY if unheard.problem is None else pack(unheard.problem)
            context.to_client(client.name, Entry(unheard.kind, rid, body=body))
        elif not (is_in_doubt or context.is_recovering):
            message = "no detached request of this name is held; it may have been collected"
            context.refuse(client.name, rid, refusal("unknown_request", message, "rid"))

    def abort(self, is_meant: Callable[[Request], bool]) -> int:
        """Cancel the doubtful requests that are meant. Returns how many."""
        doubtful = (each.request for each in self._reported.values())
        meant = [each for each in doubtful if is_meant(each) and not self._is_settled(each.rid)]
        for lost in meant:
            del self._reported[lost.rid]
            self._table.cancel(_anew(lost))
        return len(meant)

    def _answer(self, client: ClientRecord, request: Request, entry: Entry) -> None:
        context = self._context
        if request.state == "running":
            items = Accepted([(request.rid, request.attempt)])
            accepted = Entry("accepted", route=request.worker, body=pack(items))
            context.out.send(client.peer, accepted)
        elif request.state == "ended":
            self._ask_worker(request, entry.deadline_ms)
        else:
            request.is_reported = False

    def _ask_worker(self, request: Request, deadline_ms: int) -> None:
        """Have the ending sent again now: by itself its worker waits some seconds."""
        worker = self._context.members.named(request.worker)
        if worker is not None:
            name, left_ms = request.client, max(1, deadline_ms)
            attach = Entry("attach", request.rid, request.attempt, worker.epoch, name, left_ms)
            self._context.out.send(worker.peer, attach)

    def _settle(self, rid: str, client: ClientRecord) -> bool:
        """Queue a doubtful request again when its client names it; returns whether it was in doubt.

        A client that asks by name does not hold the request and cannot send it again, not even the
        process to which the loss was reported.
        """
        reported = self._reported.get(rid)
        if reported is None or reported.request.client != client.name or self._is_settled(rid):
            return False
        del self._reported[rid]
        self._revive(reported.request)
        return True

    def _is_settled(self, rid: str) -> bool:
        return rid in self._context.detached.over or self._table.get(rid) is not None

    def tick(self, now: float) -> None:
        """Queue lost requests again that their client does not send again."""
        leases = self._context.settings.leases
        for rid, (request, at, boot, seen_at) in list(self._reported.items()):
            client = self._context.clients.named(request.client)
            is_alive = client is not None and client.boot == boot and client.seen_at > seen_at
            wait_s = GIVEN_UP_AFTER * leases.resend_max_s if is_alive else leases.silence_s
            if self._is_settled(rid):
                del self._reported[rid]
            elif now - at > wait_s:
                del self._reported[rid]
                self._revive(request)

    def _revive(self, lost: Request) -> None:
        self._context.count("detached_requeued")
        request = _anew(lost)
        self._table.add(request)
        self._table.waiting.add(request)


def _anew(lost: Request) -> Request:
    """The same request as one that no worker has."""
    return Request(
        lost.rid,
        lost.client,
        lost.principal,
        lost.place,
        "queued",
        lost.rule,
        lost.body,
        lost.deadline_at,
        lost.order,
        is_suspect=lost.is_suspect,
        may_run_elsewhere=lost.may_run_elsewhere,
    )
