"""Detached requests that are over: nothing of theirs is held, or runs where the router can see it.

Spec: docs/protocol.md, "Detached requests", 6.
"""

from collections import defaultdict
from collections.abc import Iterable

from rolloutbus.bus.wire.messages.delivery import AttemptList
from rolloutbus.router.context import Context
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
