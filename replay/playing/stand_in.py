"""What a player says in the place of the router: who publishes, and what has been played.

Pure: a batch and the time (seconds) in, effects out. It serves clients and lets nobody do anything.
Spec: docs/journal.md, "Playing"; docs/protocol.md, "Membership".
"""

from collections.abc import Iterable, Sequence
from typing import cast

import msgspec

from rolloutbus.bus.actor.effects import ForgetPeer, SendAll
from rolloutbus.bus.wire.codec import PROTOCOL_VERSION, pack, unpack
from rolloutbus.bus.wire.commands import COMMANDS
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.control import (
    FleetOutcome,
    FleetStatus,
    WorkerOutcome,
    WorkerStatus,
)
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Aborted, DetachedList, Repair
from rolloutbus.bus.wire.messages.membership import (
    ClientHeartbeat,
    Dismissed,
    Hello,
    Lease,
    Member,
    Members,
    Welcome,
)
from rolloutbus.replay.playing.played import Played

Effect = SendAll | ForgetPeer

SILENT_S = 30.0
"""A client that said nothing for so long is gone."""
ENGINE = "replay"
_TO_WORKER = "worker:"


class StandIn:
    """The router of a fleet that is not there any more."""

    def __init__(
        self, instance: str, members: Sequence[Member], played: Played, *, tap: str = ""
    ) -> None:
        """Answer from now on.

        Args:
            instance: random name of this one.
            members: whose streams are played, each with the endpoint where.
            played: fills as they are.
            tap: where the recorded router's tap is played; empty: nowhere.
        """
        self._instance = instance
        self._members = list(members)
        self._played = played
        self._tap = tap
        self._epoch = 1
        self._began_at: float | None = None
        self._heard_at: dict[Peer, float] = {}
        self._out: dict[Peer, list[Entry]] = {}
        self.n_repairs = 0
        self.n_malformed = 0

    @property
    def members(self) -> list[Member]:
        """Who publishes, in the state last told."""
        return self._members

    @property
    def n_clients(self) -> int:
        """Who has said hello and was heard lately."""
        return len(self._heard_at)

    def receive(self, peer: Peer, entries: Sequence[Entry], now: float) -> list[Effect]:
        """A batch from a client."""
        if self._began_at is None:
            self._began_at = now
        for entry in entries:
            try:
                if entry.kind == "hello":
                    self._hello(peer, cast("Hello", unpack(entry)), now)
                elif peer in self._heard_at:
                    self._heard_at[peer] = now
                    self._answer(peer, entry)
                else:
                    self._dismiss(peer, "unknown-peer", "say hello first")
            except RemoteProtocolError:
                self.n_malformed += 1
        return self._drain()

    def tick(self, now: float) -> list[Effect]:
        """Forget who fell silent; call it each second or so."""
        gone = [peer for peer, at in self._heard_at.items() if now - at > SILENT_S]
        for peer in gone:
            del self._heard_at[peer]
        return [ForgetPeer(peer) for peer in gone]

    def told(self, members: Iterable[Member]) -> list[Effect]:
        """The list of workers has changed."""
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
        if not low <= PROTOCOL_VERSION <= high:
            why = f"protocol {PROTOCOL_VERSION} is spoken here, not {low} to {high}"
            self._dismiss(peer, "bad-hello", why)
            return
        if hello.router_instance != self._instance and hello.router_epoch >= self._epoch:
            self._epoch = hello.router_epoch + 1
        self._heard_at[peer] = now
        up_ms = int(1000 * (now - (self._began_at or now)))
        welcome = Welcome(
            self._epoch, self._instance, PROTOCOL_VERSION, self._members, up_ms=up_ms, tap=self._tap
        )
        self._say(peer, Entry("welcome", body=pack(welcome)))

    def _answer(self, peer: Peer, entry: Entry) -> None:
        match entry.kind:
            case "client_beat":
                seq = cast("ClientHeartbeat", unpack(entry)).seq
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
        found = self._played.repaired(cast("Repair", unpack(entry)))
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
