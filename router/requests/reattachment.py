"""A client that comes back for its detached requests: what it is told, what it takes up.

Spec: docs/protocol.md, "Detached requests".
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import NO_BODY, Entry
from rolloutbus.bus.wire.messages.delivery import Accepted, AttemptList
from rolloutbus.bus.wire.messages.generation import DetachedList, DetachedRequest
from rolloutbus.router.context import Context, refusal
from rolloutbus.router.members.clients import ClientRecord
from rolloutbus.router.requests.detached import in_order
from rolloutbus.router.requests.record import Request
from rolloutbus.router.requests.table import RequestTable

REASON = "its client has an end of it"


class SettledDetached:
    """Takes the word of clients, and that of workers for clients that may be dead."""

    def __init__(self, context: Context, table: RequestTable) -> None:
        self._context = context
        self._table = table

    def said(self, rids: Iterable[str]) -> None:
        """These have ended for their callers: drop them, and stop whoever still has them."""
        fenced: defaultdict[str, AttemptList] = defaultdict(list)
        for rid in rids:
            self._context.detached.end_for_good(rid)
            request = self._context.detached.requests.get(rid)
            if request is None:
                continue
            if request.worker:
                fenced[request.worker].append((rid, request.attempt))
            self._table.unload(request)
            self._table.forget(request)
        for name, items in fenced.items():
            self._table.fence(self._context.members.named(name), items, REASON)


GIVEN_UP_AFTER = 2
"""Longest waits between two sendings: a process that lives has sent again by then what it still
wants. What it gave up it never sends."""


class _Told(NamedTuple):
    request: Request
    at: float
    boot: str
    """Of the process that was told: another one of its name knows nothing of it."""
    seen_at: float
    """When that process had been heard of by then."""


class OrphanWatch:
    """What is kept until its client sends it again, or says that it is over."""

    def __init__(self, context: Context, table: RequestTable) -> None:
        self._context = context
        self._table = table
        self._told: dict[str, _Told] = {}

    def __len__(self) -> int:
        return len(self._told)

    def told(self, request: Request) -> None:
        """Its client was told just now that it is lost, and should send it again."""
        client = self._context.clients.named(request.client)
        if client is not None and request.body != NO_BODY and not self._context.detached.is_full:
            at = self._context.detached.followers.now
            self._told[request.rid] = _Told(request, at, client.boot, client.seen_at)

    def listed(self, client: str) -> list[DetachedRequest]:
        """Those of a client's name."""
        return [
            DetachedRequest(rid, "waiting", each.request.place.group, in_doubt=True)
            for rid, each in self._told.items()
            if each.request.client == client and not self._is_settled(rid)
        ]

    def settle(self, rid: str, client: ClientRecord) -> bool:
        """Somebody asks for it by name; whether it was in doubt.

        Who asks by name does not hold it, be it the process that was told: nobody sends it again.
        """
        told = self._told.get(rid)
        if told is None or told.request.client != client.name or self._is_settled(rid):
            return False
        del self._told[rid]
        self._revive(told.request)
        return True

    def _is_settled(self, rid: str) -> bool:
        return rid in self._context.detached.over or self._table.get(rid) is not None

    def tick(self, now: float) -> None:
        """Queue again what nobody takes care of."""
        leases = self._context.settings.leases
        for rid, (request, at, boot, seen_at) in list(self._told.items()):
            client = self._context.clients.named(request.client)
            is_alive = client is not None and client.boot == boot and client.seen_at > seen_at
            wait_s = GIVEN_UP_AFTER * leases.resend_max_s if is_alive else leases.silence_s
            if self._is_settled(rid):
                del self._told[rid]
            elif now - at > wait_s:
                del self._told[rid]
                self._revive(request)

    def _revive(self, lost: Request) -> None:
        self._context.count("detached_requeued")
        request = Request(
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
        )
        self._table.add(request)
        self._table.waiting.add(request)


class Reattachment:
    """Answers `list_detached` and `attach`."""

    def __init__(self, context: Context, doubts: OrphanWatch) -> None:
        self._context = context
        self._doubts = doubts

    def list_detached(self, client: ClientRecord, entry: Entry, _now: float) -> None:
        """Name what is known; while workers may still report more, the client asks again."""
        if not self._context.is_recovering:
            known = self._context.detached.listed(client.name)
            found = in_order([*known, *self._doubts.listed(client.name)])
            self._context.finish(client.name, entry.rid, pack(DetachedList(found)))

    def attach(self, client: ClientRecord, entry: Entry, _now: float) -> None:
        """Follow a request over this connection from now on."""
        context, rid = self._context, entry.rid
        is_in_doubt = self._doubts.settle(rid, client)
        request = context.detached.requests.get(rid)
        unheard = context.detached.unheard(rid, client.name)
        if request is not None and request.client == client.name:
            context.detached.follow(rid, client.peer, has_prompt=False)
            self._answer(client, request, entry)
        elif unheard is not None:
            context.refuse(client.name, rid, unheard.problem, unheard.kind)
        elif not (is_in_doubt or context.is_recovering):
            message = "no detached request of this name is held; it may have been collected"
            context.refuse(client.name, rid, refusal("unknown_request", message, "rid"))

    def _answer(self, client: ClientRecord, request: Request, entry: Entry) -> None:
        context = self._context
        if request.state == "running":
            items = Accepted([(request.rid, request.attempt)])
            accepted = Entry("accepted", route=request.worker, body=pack(items))
            context.out.send(client.peer, accepted)
        elif request.state == "ended":
            self.ask_worker(request, entry.deadline_ms)
        else:
            request.is_reported = False

    def ask_worker(self, request: Request, deadline_ms: int) -> None:
        """Have the ending sent again now: by itself its worker waits some seconds."""
        worker = self._context.members.named(request.worker)
        if worker is not None:
            attach = Entry(
                "attach",
                request.rid,
                request.attempt,
                worker.epoch,
                request.client,
                max(1, deadline_ms),
            )
            self._context.out.send(worker.peer, attach)
