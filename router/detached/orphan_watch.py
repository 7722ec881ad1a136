"""Detached requests whose client was told of a loss: unless it sends them again, the router does.

Spec: docs/protocol.md, "Detached requests".
"""

from typing import NamedTuple

from rolloutbus.bus.wire.entry import NO_BODY
from rolloutbus.bus.wire.messages.generation import DetachedRequest
from rolloutbus.router.context import Context
from rolloutbus.router.members.clients import ClientRecord
from rolloutbus.router.requests.record import Request
from rolloutbus.router.requests.table import RequestTable

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
        request = Request(lost.rid, lost.client, lost.place, "queued")
        request.principal = lost.principal
        request.body, request.rule = lost.body, lost.rule
        request.deadline_at, request.order = lost.deadline_at, lost.order
        request.is_suspect = lost.is_suspect
        self._table.add(request)
        self._table.waiting.add(request)
