"""Publishes streams: per topic the columns of all rows of one loop tick, and idle heartbeats."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from rolloutbus.bus.actor.effects import Publish
from rolloutbus.bus.wire.codec import pack, topic_of
from rolloutbus.bus.wire.entry import Entry, Epoch
from rolloutbus.bus.wire.messages.generation import Deltas, FinishReason, Idle
from rolloutbus.engine_worker.settings import StreamSettings
from rolloutbus.engine_worker.worker.requests import RunningRequest


@dataclass(slots=True)
class _Columns:
    """Rows of one topic that wait for the end of the tick."""

    rids: list[str] = field(default_factory=list[str])
    attempts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    seqs: list[int] = field(default_factory=list[int])
    counts: list[int] = field(default_factory=list[int])
    tokens: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    behaviour: bytearray = field(default_factory=bytearray)
    has_behaviour: bool = False
    versions: list[int] = field(default_factory=list[int])
    finishes: list[tuple[int, FinishReason]] = field(default_factory=list[tuple[int, FinishReason]])

    def add(self, request: RunningRequest, seq: int, count: int, version: int) -> None:
        """One row: tokens [seq, seq + count) of a request, all of one version."""
        rid, attempt = request.key
        self.rids.append(rid)
        self.attempts.append(attempt)
        self.seqs.append(seq)
        self.counts.append(count)
        self.versions.append(version)
        tokens, logprobs, behaviour = request.columns(seq, seq + count)
        self.tokens += tokens
        self.logprobs += logprobs
        self.behaviour += behaviour
        self.has_behaviour |= request.has_behaviour

    def body(self) -> Deltas:
        return Deltas(
            rids=self.rids,
            attempts=self.attempts,
            seqs=self.seqs,
            counts=self.counts,
            tokens=bytes(self.tokens),
            logprobs=bytes(self.logprobs),
            versions=self.versions,
            finishes=self.finishes,
            behaviour_logprobs=bytes(self.behaviour) if self.has_behaviour else b"",
        )


class StreamBatcher:
    """Collects rows per client and turns them into one entry per topic."""

    def __init__(self, worker: str, settings: StreamSettings) -> None:
        self._worker = worker
        self._settings = settings
        self._columns: dict[str, _Columns] = {}
        self._topics: dict[str, bytes] = {}
        self._idle_at = 0.0

    def sampled(self, request: RunningRequest, version: int, now: float) -> None:
        """A request has new tokens: publish them now or, if no one streams, in larger portions."""
        n_new = request.n_tokens - request.n_published
        if request.is_streamed or n_new >= self._settings.coarse_tokens:
            self._publish(request, version, now)

    def ended(self, request: RunningRequest, reason: FinishReason, now: float) -> None:
        """Publish what is left of a request, and its end."""
        version = request.runs[-1][0] if request.runs else 0
        if request.n_tokens > request.n_published:
            self._publish(request, version, now)
            columns = self._columns[request.client]
        else:
            columns = self._columns_of(request.client)
            columns.add(request, request.n_tokens, 0, version)
        columns.finishes.append((len(columns.rids) - 1, reason))

    def flush(self, epoch: Epoch) -> list[Publish]:
        """Publish everything collected in this tick."""
        if not self._columns:
            return []
        waiting, self._columns = self._columns, {}
        return [
            self._entry("deltas", client, columns.body(), epoch)
            for client, columns in waiting.items()
        ]

    def tick(self, requests: Iterable[RunningRequest], epoch: Epoch, now: float) -> list[Publish]:
        """Publish overdue coarse rows and idle heartbeats."""
        if now < self._idle_at:
            return []
        self._idle_at = now + self._settings.idle_s
        open_by_client: dict[str, list[RunningRequest]] = {}
        for request in requests:
            open_by_client.setdefault(request.client, []).append(request)
            is_overdue = now - request.published_at >= self._settings.coarse_s
            if is_overdue and request.n_tokens > request.n_published:
                self._publish(request, request.runs[-1][0], now)
        for client in self._topics.keys() - open_by_client.keys():
            del self._topics[client]
        published = self.flush(epoch)
        for client, rows in open_by_client.items():
            idle = Idle(
                rids=[row.key[0] for row in rows],
                attempts=[row.key[1] for row in rows],
                n_tokens=[row.n_published for row in rows],
            )
            published.append(self._entry("idle", client, idle, epoch))
        return published

    def _publish(self, request: RunningRequest, version: int, now: float) -> None:
        start, stop = request.n_published, request.n_tokens
        columns = self._columns_of(request.client)
        if request.runs[-1][1] >= stop - start:
            columns.add(request, start, stop - start, version)
        else:
            for run_version, count in request.runs_from(start):
                columns.add(request, start, count, run_version)
                start += count
        request.n_published = stop
        request.published_at = now

    def _columns_of(self, client: str) -> _Columns:
        columns = self._columns.get(client)
        if columns is None:
            columns = self._columns[client] = _Columns()
        return columns

    def _entry(self, kind: str, client: str, body: Deltas | Idle, epoch: Epoch) -> Publish:
        topic = self._topics.get(client)
        if topic is None:
            topic = self._topics[client] = topic_of(client)
        return Publish(topic, Entry(kind, epoch=epoch, route=self._worker, body=pack(body)))
