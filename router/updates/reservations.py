"""Versions that clients have taken from the store, given back when their client is gone.

Spec: docs/protocol.md, "Weights", 12.
"""

from rolloutbus.bus.wire.codec import pack, unpack, unpack_result
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.control import WorkerOutcome
from rolloutbus.bus.wire.messages.weights import (
    Reserved,
    ReserveVersion,
    RestoreVersion,
    SettleVersion,
    VersionRestored,
)
from rolloutbus.router.context import Context
from rolloutbus.router.members.member_commands import MemberCommand, MemberCommands, Results
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.updates.publications import Publications

SETTLE_S = 10.0
MAX_PER_CLIENT = 16
"""Of one client; the oldest are the store's to give up."""
MAX_ABANDONED = 1000

Key = tuple[str, int]
"""(policy, version)."""


class Reservations:
    """Who has which versions that are not committed yet."""

    def __init__(self, context: Context, fleet: MemberCommands, publications: Publications) -> None:
        self._context = context
        self._fleet = fleet
        self._publications = publications
        self._by_client: dict[str, list[Key]] = {}
        self._abandoned: dict[Key, None] = {}
        """Whose client is gone."""
        self._n_asked = 0
        for kind in ("reserve_version", "restore_version", "settle_version"):
            fleet.watch(kind, self._heard)

    def client_gone(self, client: str) -> None:
        """Nobody will write or publish its versions."""
        for key in self._by_client.pop(client, []):
            if len(self._abandoned) < MAX_ABANDONED:
                self._abandoned[key] = None

    def tick(self, now: float) -> None:
        """Give back what was abandoned and is not being published."""
        store = self._context.members.store()
        if store is None:
            return
        for key in list(self._abandoned):
            if not self._publications.is_under_way(*key):
                del self._abandoned[key]
                self._settle(key, store, now)

    def _settle(self, key: Key, store: MemberRecord, now: float) -> None:
        def done(_results: Results, silent: list[str], _now: float) -> None:
            if silent:
                self._abandoned[key] = None

        self._n_asked += 1
        self._context.count("versions_given_back")
        rid = f"settle-{self._context.instance[:8]}-{self._n_asked}"
        body = pack(SettleVersion(*key))
        command = MemberCommand(rid, "settle_version", body, now + SETTLE_S, done)
        self._fleet.start(command, [store], now)

    def _heard(
        self, command: Entry, _member: MemberRecord, outcome: WorkerOutcome, _now: float
    ) -> None:
        """The store has answered a client."""
        client = command.rid.rpartition("/")[0]
        try:
            asked = unpack(command)
            found = unpack_result(command.kind, Entry(outcome.kind, body=outcome.body))
        except RemoteProtocolError:
            return
        if outcome.kind != "finished":
            return
        match asked, found:
            case (ReserveVersion(policy=policy) | RestoreVersion(policy=policy), _) if isinstance(
                found, Reserved | VersionRestored
            ):
                if self._context.clients.named(client) is None:
                    self._abandoned[(policy, found.version)] = None
                    return
                mine = self._by_client.setdefault(client, [])
                mine.append((policy, found.version))
                del mine[:-MAX_PER_CLIENT]
            case (SettleVersion(policy=policy, version=version), _):
                mine = self._by_client.get(client, [])
                if (policy, version) in mine:
                    mine.remove((policy, version))
            case _:
                pass
