"""What becomes of requests whose execution was lost: gone on with, begun again, or given up.

Spec: docs/protocol.md, "Delivery".
"""

from rolloutbus.bus.wire.errors import EngineFailed, PeerLost
from rolloutbus.bus.wire.messages.delivery import Lost
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.trainer_adapter.client.core.endings import cancelled
from rolloutbus.trainer_adapter.client.core.request_book import ClientContext, RequestBook
from rolloutbus.trainer_adapter.client.core.requests import OpenRequest

ENGINE_CRASHED = "engine_crashed"


class LossPolicy:
    """Judges `lost`."""

    def __init__(self, desk: ClientContext, book: RequestBook) -> None:
        self._counters = desk.counters
        self._max_crashes = desk.settings.max_crashes
        self._book = book

    def lost(self, body: Lost, now: float) -> None:
        """Executions are gone with their worker: resume, retry or give up."""
        for rid, attempt in body.items:
            request = self._book.open.get(rid)
            if request is None:
                continue
            if attempt in request.dead_attempts:
                # Its router had taken it up again, in the place of what was sent since.
                self._book.doubt(request, now)
                continue
            self._counters.lost += 1
            if not request.bury(attempt):
                continue
            if body.reason == ENGINE_CRASHED:
                request.n_crashes += 1
                request.owes_retry = True
            self._judge(request, body, now)

    def _judge(self, request: OpenRequest, body: Lost, now: float) -> None:
        if request.abort_since is not None:
            self._book.end(request, cancelled(request, None), now)
        elif request.n_crashes >= self._max_crashes:
            self._book.end(request, _crashed_too_often(request), now)
        elif request.ask.on_loss == "fail" or not request.is_generate:
            error = PeerLost(f"worker {body.worker} was lost ({body.reason}) while it ran")
            self._book.end(request, error, now)
            if request.ask.kind == "generate" and request.ask.is_detached:
                # Its caller wants no other execution; who attached may yet come back for it.
                self._book.acks.over(request.rid, now)
        else:
            self._book.go_on(request, now)


def _crashed_too_often(request: OpenRequest) -> EngineFailed:
    message = f"The engine crashed {request.n_crashes} times while this request ran."
    return EngineFailed(Problem(ENGINE_CRASHED, message, "failed"), rid=request.rid)
