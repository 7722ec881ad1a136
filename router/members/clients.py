"""Clients as the router sees them: a name, a connection, and when they were last heard."""

import re
from collections.abc import Callable, Iterator

from rolloutbus.bus.security.principals import Principal
from rolloutbus.bus.wire.entry import Peer
from rolloutbus.bus.wire.limits import MAX_PRIORITY
from rolloutbus.bus.wire.validation import RID_NUMBER

NOWHERE = Peer(b"")
"""The connection of who has none."""
ANY_PRIORITY = (-MAX_PRIORITY, MAX_PRIORITY)
"""Where there are no keys everybody is trusted."""


class ClientRecord:
    """One client process; survives its connections."""

    def __init__(
        self, name: str, boot: str, peer: Peer, now: float, principal: Principal | None = None
    ) -> None:
        self.name = name
        self.boot = boot
        self.peer = peer
        self.seen_at = now
        self.principal = name if principal is None else principal.name
        """Whose share it takes: all names of one key have one together. Without keys, its own."""
        self.priorities = ANY_PRIORITY if principal is None else principal.priorities
        self.is_router = False
        """It is the standby of this router, which listens as a client does."""
        self.heartbeat_seq = 0
        """The highest on this connection: a copy of an older heartbeat is no sign of life."""
        self.rid_prefix = f"{name}/"
        """What the rids of its own commands begin with."""
        self.match_rid = re.compile(re.escape(self.rid_prefix) + RID_NUMBER).fullmatch
        """`check_rid` with the name built in: one call for each `generate`."""


class Clients:
    """All known clients, by name and by connection."""

    def __init__(self) -> None:
        self._by_name: dict[str, ClientRecord] = {}
        self._by_peer: dict[Peer, ClientRecord] = {}
        self._missed: dict[str, ClientRecord] = {}
        """Those whose requests workers run, and who have not said hello."""
        self.named: Callable[[str], ClientRecord | None] = self._by_name.get
        """The client with this name; the dict's own method, asked for each entry that leaves."""
        self.at: Callable[[Peer], ClientRecord | None] = self._by_peer.get

    def __iter__(self) -> Iterator[ClientRecord]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def miss(self, name: str, now: float) -> None:
        """A worker runs something for this client: it is silent from now on, if it is not here."""
        if name not in self._by_name and name not in self._missed:
            self._missed[name] = ClientRecord(name, "", NOWHERE, now)

    def join(
        self, name: str, boot: str, peer: Peer, now: float, principal: Principal | None = None
    ) -> Peer | None:
        """A client says hello; returns the connection it replaces, if any."""
        old = self._by_name.get(name)
        if old is not None:
            self._by_peer.pop(old.peer, None)
        self._missed.pop(name, None)
        record = ClientRecord(name, boot, peer, now, principal)
        self._by_name[name] = record
        self._by_peer[peer] = record
        return old.peer if old is not None and old.peer != peer else None

    def remove(self, record: ClientRecord) -> None:
        """The client is gone."""
        for table in (self._by_name, self._missed):
            if table.get(record.name) is record:
                del table[record.name]
        if self._by_peer.get(record.peer) is record:
            del self._by_peer[record.peer]

    def silent_since(self, moment: float) -> list[ClientRecord]:
        """Clients not heard of since `moment`."""
        everybody = [*self._by_name.values(), *self._missed.values()]
        return [record for record in everybody if record.seen_at < moment]
