"""Clients as the router sees them: a name, a connection, and when they were last heard."""

from collections.abc import Iterator

from bus.ids import Peer


class ClientRecord:
    """One client process; survives its connections."""

    __slots__ = ("boot", "name", "peer", "rid_prefix", "seen_at")

    def __init__(self, name: str, boot: str, peer: Peer, now: float) -> None:
        self.name = name
        self.boot = boot
        self.peer = peer
        self.seen_at = now
        self.rid_prefix = f"{name}/"
        """What the rids of its own commands begin with."""


class Clients:
    """All known clients, by name and by connection."""

    def __init__(self) -> None:
        self._by_name: dict[str, ClientRecord] = {}
        self._by_peer: dict[Peer, ClientRecord] = {}

    def __iter__(self) -> Iterator[ClientRecord]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def named(self, name: str) -> ClientRecord | None:
        """The client with this name."""
        return self._by_name.get(name)

    def at(self, peer: Peer) -> ClientRecord | None:
        """The client on this connection."""
        return self._by_peer.get(peer)

    def join(self, name: str, boot: str, peer: Peer, now: float) -> Peer | None:
        """A client says hello; returns the connection it replaces, if any."""
        old = self._by_name.get(name)
        if old is not None:
            self._by_peer.pop(old.peer, None)
        record = ClientRecord(name, boot, peer, now)
        self._by_name[name] = record
        self._by_peer[peer] = record
        return old.peer if old is not None and old.peer != peer else None

    def remove(self, record: ClientRecord) -> None:
        """The client is gone."""
        self._by_name.pop(record.name, None)
        self._by_peer.pop(record.peer, None)

    def silent_since(self, moment: float) -> list[ClientRecord]:
        """Clients not heard of since `moment`."""
        return [record for record in self._by_name.values() if record.seen_at < moment]
