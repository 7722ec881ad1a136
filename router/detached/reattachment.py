"""A client that comes back for its detached requests: what it is told, what it takes up.

Spec: docs/protocol.md, "Detached requests".
"""

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.delivery import Accepted
from rolloutbus.bus.wire.messages.generation import DetachedList
from rolloutbus.router.context import Context, refusal
from rolloutbus.router.detached.detached import in_order
from rolloutbus.router.detached.orphan_watch import OrphanWatch
from rolloutbus.router.members.clients import ClientRecord
from rolloutbus.router.requests.record import Request


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
