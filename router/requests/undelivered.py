"""Requests that could not be sent to their worker: others get them at once.

A connection that is gone shows when something is sent over it, long before a lease expires.
Spec: docs/protocol.md, "Generation", 2.
"""

from collections.abc import Iterable

from rolloutbus.bus.wire.entry import Entry
from rolloutbus.router.context import Context
from rolloutbus.router.members.records import MemberRecord, Reason
from rolloutbus.router.requests.table import RequestTable


class Undelivered:
    """Takes back what a worker never got, and sends it nothing new until it is heard of."""

    def __init__(self, context: Context, table: RequestTable) -> None:
        self._context = context
        self._table = table

    def returned(self, worker: MemberRecord, entries: Iterable[Entry]) -> None:
        """None of these entries has left."""
        table = self._table
        self._context.eligibility.block(worker, Reason.CUT_OFF)
        for entry in entries:
            request = table.get(entry.rid) if entry.kind == "generate" else None
            is_current = request is not None and request.attempt == entry.attempt
            if request is None or not is_current or request.state != "sent" or request.n_sent > 1:
                continue  # what was sent before may have arrived
            self._context.count("undelivered")
            table.requeue(request, "lost")
