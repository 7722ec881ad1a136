"""Reading the stream plane: rows into their requests, gaps noticed and repaired.

Spec: docs/protocol.md, "Streams".
"""

from rolloutbus.bus.streams.reassembly import Row, row_of_repaired, rows_of
from rolloutbus.bus.wire.codec import unpack_as
from rolloutbus.bus.wire.entry import Attempt, Entry
from rolloutbus.bus.wire.messages.generation import Deltas, Idle, Repair, Repaired
from rolloutbus.trainer_adapter.client.core.effects import Deliver, Outcome
from rolloutbus.trainer_adapter.client.core.ending_handler import delta_of
from rolloutbus.trainer_adapter.client.core.request_book import (
    INTERNAL_DEADLINE_S,
    ClientContext,
    RequestBook,
)
from rolloutbus.trainer_adapter.client.core.requests import Ask, OpenRequest
from rolloutbus.trainer_adapter.client.core.results import FleetResult


class StreamReader:
    """Feeds what workers publish to this client into its open requests."""

    def __init__(self, desk: ClientContext, book: RequestBook) -> None:
        self._settings = desk.settings
        self._counters = desk.counters
        self._out = desk.out
        self._book = book
        self._under_repair: set[str] = set()

    def receive(self, entry: Entry, now: float) -> None:
        """One published entry.

        Raises:
            RemoteProtocolError: its body breaks its type.
        """
        if entry.kind == "deltas":
            deltas = unpack_as(Deltas, entry)
            last_rows = {row for row, _ in deltas.finishes}
            for index, (rid, attempt, row) in enumerate(rows_of(deltas)):
                self._row(entry.route, (rid, attempt), row, now, is_last=index in last_rows)
        elif entry.kind == "idle":
            idle = unpack_as(Idle, entry)
            for rid, attempt, n_tokens in zip(
                idle.rids, idle.attempts, idle.n_tokens, strict=False
            ):
                # A word of an execution is as good as the router's own that it has begun.
                request = self._book.accepted(rid, attempt, entry.route, now)
                if request is None:
                    continue
                request.assembly.heard(n_tokens)
                if request.assembly.gap is not None:
                    self._missing(entry.route, request, attempt, now)
        else:
            self._counters.unexpected_in += 1

    def _row(
        self, worker: str, key: tuple[str, Attempt], row: Row, now: float, *, is_last: bool
    ) -> None:
        rid, attempt = key
        request = self._book.accepted(rid, attempt, worker, now)
        if request is None:
            self._counters.stale_deltas += 1
            return
        if row.end > request.max_tokens:
            self._counters.malformed_in += 1  # the result tells what it was; this is not held
            return
        assembly = request.assembly
        n_before = assembly.n_tokens
        if not assembly.add(row):
            self._missing(worker, request, attempt, now)
        elif row.tokens and assembly.n_tokens == n_before:
            self._counters.duplicates += 1
        # A stream's last tokens are delivered with its result, which says why it ended.
        if request.is_streamed and not is_last:
            self._deliver(request)

    def _missing(self, worker: str, request: OpenRequest, attempt: Attempt, now: float) -> None:
        """Asks the worker for rows that it published and this client has not received."""
        rid = request.rid
        if rid in self._under_repair or not worker or not request.saw(attempt, worker):
            return
        if request.assembly.n_repairs == 0:
            self._counters.gaps += 1
        if request.assembly.n_repairs >= self._settings.repair_tries:
            return
        request.assembly.n_repairs += 1
        self._counters.repairs += 1
        self._under_repair.add(rid)

        def repaired(outcome: Outcome, _: float) -> None:
            self._under_repair.discard(rid)
            if isinstance(outcome, FleetResult):
                for result in outcome.by_worker.values():
                    if isinstance(result, Repaired):
                        self._repaired(rid, attempt, result)

        ask = Ask(
            "repair",
            Repair(rid, attempt, request.assembly.n_tokens),
            route=f"worker:{worker}",
        )
        self._book.add(ask, INTERNAL_DEADLINE_S, now, repaired)

    def _repaired(self, rid: str, attempt: Attempt, result: Repaired) -> None:
        request = self._book.open.get(rid)
        if request is None or request.attempt != attempt or attempt in request.dead_attempts:
            return
        row = row_of_repaired(result)
        if row is None or row.end > request.max_tokens:
            self._counters.malformed_in += 1
            return
        if row.tokens and request.is_truncated and not row.behaviour_logprobs:
            return  # as a prefix it would be wrong: better wait for the result
        n_before = request.assembly.n_tokens
        request.assembly.repaired(row)
        # More may have got lost while the repair was under way: then there is a gap again.
        if request.assembly.gap is None or request.assembly.n_tokens > n_before:
            request.assembly.n_repairs = 0
        if request.is_streamed:
            self._deliver(request)

    def _deliver(self, request: OpenRequest) -> None:
        self._out.extend(
            Deliver(request.rid, delta_of(request, row)) for row in request.assembly.read()
        )
