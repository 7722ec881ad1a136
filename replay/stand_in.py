"""Answers clients in place of the router: lists publishers, and repairs played streams.

Pure: a batch and the time (seconds) in, effects out. It answers clients, and refuses all commands.
Spec: docs/journal.md, "Playing"; docs/protocol.md, "Membership".
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from rolloutbus.bus.actor.effects import ForgetPeer, SendAll
from rolloutbus.bus.streams.reassembly import TOKEN_BYTES, Row, TokenColumns, rows_of
from rolloutbus.bus.wire.codec import SPOKEN, pack, unpack_as
from rolloutbus.bus.wire.commands import COMMANDS
from rolloutbus.bus.wire.entry import Attempt, Entry, Peer
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.control import (
    FleetOutcome,
    FleetStatus,
    WorkerOutcome,
    WorkerStatus,
)
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import (
    Aborted,
    Deltas,
    DetachedList,
    Prefix,
    Repair,
    Repaired,
)
from rolloutbus.bus.wire.messages.membership import (
    ClientHeartbeat,
    Dismissed,
    Hello,
    Lease,
    Member,
    Members,
    Welcome,
)

MAX_BYTES = 256 * 1024 * 1024


class _Rows:
    """The tokens of one attempt, from the first that was recorded without a gap after it."""

    __slots__ = ("held", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.held = TokenColumns()

    @property
    def end(self) -> int:
        return self.start + self.held.n_tokens

    @property
    def size_bytes(self) -> int:
        return 3 * len(self.held.tokens)

    def put_after(self, row: Row) -> None:
        """Go on with the next row."""
        if row.start > self.end:  # the recorder has missed some: no repair goes across that
            self.start, self.held = row.start, TokenColumns()
        self.held.append(row)

    def put_before(self, prefix: Prefix) -> None:
        """Begin with what an earlier attempt has sampled."""
        after, self.start, self.held = self.part(self.start), 0, TokenColumns()
        self.held.append(Row(0, *msgspec.structs.astuple(prefix)))
        self.held.append(after)

    def part(self, start: int) -> Row:
        """From token `start` of the request on."""
        row = self.held.part(start - self.start, self.held.n_tokens)
        return row._replace(start=start)


class Played:
    """Played tokens of all recorded workers, kept to answer repairs."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._rows: OrderedDict[tuple[str, Attempt], _Rows] = OrderedDict()

    def add(self, entry: Entry) -> None:
        """Stores the tokens of a published entry.

        Raises:
            RemoteProtocolError: its body breaks its type.
        """
        if entry.kind != "deltas":
            return
        for rid, attempt, row in rows_of(unpack_as(Deltas, entry)):
            self._row((rid, attempt), row)
        while self._size_bytes > self._max_bytes and len(self._rows) > 1:
            _, oldest = self._rows.popitem(last=False)
            self._size_bytes -= oldest.size_bytes

    def begins(self, key: tuple[str, Attempt], prefix: Prefix) -> None:
        """Records that an attempt continues after `prefix`; its rows may have come already."""
        n_bytes = len(prefix.tokens)
        behaviour = prefix.behaviour_logprobs or prefix.logprobs
        if {len(prefix.logprobs), len(behaviour)} != {n_bytes} or n_bytes % TOKEN_BYTES:
            return  # whatever a client sent there, no worker took it
        rows = self._rows.setdefault(key, _Rows(n_bytes // TOKEN_BYTES))
        if rows.start == n_bytes // TOKEN_BYTES > 0:
            self._size_bytes -= rows.size_bytes
            rows.put_before(prefix)
            self._size_bytes += rows.size_bytes

    def repaired(self, repair: Repair) -> Repaired | Problem:
        """Returns the played tokens of an attempt from token `start` on."""
        rows = self._rows.get((repair.rid, repair.attempt))
        if rows is None:
            why = "nothing of this attempt has been played, or so long ago that it is forgotten"
            return Problem("bad_request", why, "not_started", field="rid")
        if not rows.start <= repair.start <= rows.end:
            why = f"start is {repair.start}; tokens {rows.start} to {rows.end} have been played"
            return Problem("bad_request", why, "not_started", field="start")
        return Repaired(*rows.part(repair.start))

    def _row(self, key: tuple[str, Attempt], row: Row) -> None:
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = _Rows(row.start)
        self._rows.move_to_end(key)
        if row.start >= rows.end and row.tokens:
            self._size_bytes -= rows.size_bytes
            rows.put_after(row)
            self._size_bytes += rows.size_bytes


Effect = SendAll | ForgetPeer

SILENT_S = 30.0
"""A client that said nothing for so long is gone."""
ENGINE = "replay"
_TO_WORKER = "worker:"


class StandIn:
    """Stands in for the router of a recorded fleet."""

    def __init__(
        self, instance: str, members: Sequence[Member], played: Played, *, tap: str = ""
    ) -> None:
        """`instance`: random name of this one; `tap`: where the recorded one is played."""
        self._instance = instance
        self._members = list(members)
        self._played = played
        self._tap = tap
        self._epoch = 1
        self._began_at: float | None = None
        self._heard_at: dict[Peer, float] = {}
        self._out: dict[Peer, list[Entry]] = {}
        self.n_repairs = 0
        self.repair_at = -math.inf
        """When a repair was last asked for."""
        self.n_malformed = 0

    @property
    def members(self) -> list[Member]:
        """Publishers, in the state last reported."""
        return self._members

    @property
    def n_clients(self) -> int:
        """Number of clients that said hello and were heard lately."""
        return len(self._heard_at)

    def receive(self, peer: Peer, entries: Sequence[Entry], now: float) -> list[Effect]:
        """A batch from a client."""
        if self._began_at is None:
            self._began_at = now
        for entry in entries:
            try:
                if entry.kind == "hello":
                    self._hello(peer, unpack_as(Hello, entry), now)
                elif peer in self._heard_at:
                    self._heard_at[peer] = now
                    if entry.kind == "repair":
                        self.repair_at = now
                    self._answer(peer, entry)
                else:
                    self._dismiss(peer, "unknown-peer", "say hello first")
            except RemoteProtocolError:
                self.n_malformed += 1
        return self._drain()

    def tick(self, now: float) -> list[Effect]:
        """Forgets clients that have been silent for too long; call it about once a second."""
        gone = [peer for peer, at in self._heard_at.items() if now - at > SILENT_S]
        for peer in gone:
            del self._heard_at[peer]
        return [ForgetPeer(peer) for peer in gone]

    def told(self, members: Iterable[Member]) -> list[Effect]:
        """Sends a changed list of workers to all clients."""
        self._members = list(members)
        entry = Entry("members", body=pack(Members(self._members)))
        for peer in self._heard_at:
            self._say(peer, entry)
        return self._drain()

    def _hello(self, peer: Peer, hello: Hello, now: float) -> None:
        if hello.role != "client":
            self._dismiss(peer, "bad-hello", f"this is a replay: nothing for a {hello.role} to do")
            return
        low, high = hello.protocol
        chosen = max(low, SPOKEN[0])
        if chosen > min(high, SPOKEN[1]):
            why = f"protocol {SPOKEN[0]} to {SPOKEN[1]} is spoken here, not {low} to {high}"
            self._dismiss(peer, "bad-hello", why)
            return
        if hello.router_instance != self._instance and hello.router_epoch >= self._epoch:
            self._epoch = hello.router_epoch + 1
        self._heard_at[peer] = now
        up_ms = int(1000 * (now - (self._began_at or now)))
        welcome = Welcome(
            self._epoch, self._instance, chosen, self._members, up_ms=up_ms, tap=self._tap
        )
        self._say(peer, Entry("welcome", body=pack(welcome)))

    def _answer(self, peer: Peer, entry: Entry) -> None:
        match entry.kind:
            case "client_beat":
                seq = unpack_as(ClientHeartbeat, entry).seq
                lease = Lease(self._epoch, self._instance, seq)
                self._say(peer, Entry("lease", body=pack(lease)))
            case "goodbye":
                del self._heard_at[peer]
            case "repair":
                self._repair(peer, entry)
            case "status":
                self._finish(peer, entry, self._status())
            case "list_detached":
                self._finish(peer, entry, DetachedList([]))
            case "abort":
                self._finish(peer, entry, Aborted(0))
            case kind if kind in COMMANDS:
                why = "this is a replay: what was recorded can be read, and nothing can be asked"
                self._refuse(peer, entry, Problem("forbidden", why, "not_started"))
            case _:
                pass  # acknowledgements and the like

    def _repair(self, peer: Peer, entry: Entry) -> None:
        worker = entry.route.removeprefix(_TO_WORKER)
        if all(member.name != worker for member in self._members):
            why = f"{worker[:64]!r} has published nothing in this recording"
            self._refuse(peer, entry, Problem("unknown_worker", why, "not_started"))
            return
        self.n_repairs += 1
        found = self._played.repaired(unpack_as(Repair, entry))
        kind = "refused" if isinstance(found, Problem) else "finished"
        outcome = WorkerOutcome(worker, kind, pack(found))
        self._finish(peer, entry, FleetOutcome([outcome], silent=[]))

    def _status(self) -> FleetStatus:
        rows = [
            WorkerStatus(
                name=each.name,
                epoch=each.epoch,
                state=each.state,
                policy=each.policy,
                version=each.version,
                engine=ENGINE,
                slots=0,
                n_running=0,
                n_tokens=0,
                beat_age_ms=0,
                stalled_ms=0.0,
                pid=0,
            )
            for each in self._members
        ]
        return FleetStatus(
            router_epoch=self._epoch,
            instance=self._instance,
            recovering=False,
            workers=rows,
            committed={},
            n_queued=0,
            n_running=0,
            n_clients=self.n_clients,
            counters={"repairs": self.n_repairs},
        )

    def _finish(self, peer: Peer, entry: Entry, body: msgspec.Struct) -> None:
        self._say(peer, Entry("finished", entry.rid, body=pack(body)))

    def _refuse(self, peer: Peer, entry: Entry, problem: Problem) -> None:
        self._say(peer, Entry("refused", entry.rid, body=pack(problem)))

    def _dismiss(self, peer: Peer, code: str, why: str) -> None:
        self._say(peer, Entry("dismissed", body=pack(Dismissed(code, why))))

    def _say(self, peer: Peer, entry: Entry) -> None:
        self._out.setdefault(peer, []).append(entry)

    def _drain(self) -> list[Effect]:
        out, self._out = self._out, {}
        return [SendAll(peer, entries) for peer, entries in out.items()]
