"""Which fleet a client's tokens and version numbers are of, and whether its router serves that one.

Spec: docs/protocol.md, "Intent".
"""

from rolloutbus.bus.actor.ref import STORE
from rolloutbus.bus.wire.messages.control import LoadLora
from rolloutbus.bus.wire.messages.generation import CloseSession, OpenSession
from rolloutbus.trainer_adapter.client.core.effects import FleetChanged
from rolloutbus.trainer_adapter.client.core.link import RouterLink
from rolloutbus.trainer_adapter.client.core.requests import Ask, OpenRequest

READ_ONLY = frozenset({"abort", "status"})
"""They bring no fleet anything, and take nothing home."""
OF_WHAT_WAS_BEGUN = frozenset({"attach", "seal_version", "publish_version", "settle_version"})
"""Commands that name a request or a version that a fleet gave a number to."""


class KnownFleet:
    """The fleet that a client knows, and what it asks of no other one."""

    def __init__(self, link: RouterLink, name: str) -> None:
        """`name` is of the fleet that the caller expects; empty: any."""
        self._link = link
        self.name = name
        """Identity of the fleet; empty before it is known."""
        self._trusted = name
        """The fleet whose version numbers the caller knows."""
        self.is_bound = bool(name)
        """The caller expects this fleet, and takes no other one."""
        self._named_by = ""
        """Instance of the router that told the identity."""
        self._renamed: dict[str, str] = {}
        """A name that a router gave its fleet before it knew the older one -> that one."""

    @property
    def is_in_doubt(self) -> bool:
        """Whether the router has named no fleet yet, so that it may serve another one."""
        return bool(self.name) and self._named_by != self._link.instance

    @property
    def change(self) -> FleetChanged | None:
        """The fleet that answers, if it is another one than the caller knows."""
        return None if self.name == self._trusted else FleetChanged(self._trusted, self.name)

    def is_present(self, fleet: str) -> bool:
        """Whether the fleet that answers is the one that had this name; empty: any is."""
        return not fleet or self._renamed.get(fleet, fleet) == self.name

    def accept(self) -> None:
        """Version numbers are those of the fleet that answers from now on."""
        self._trusted = self.name

    def named(self, fleet: str) -> FleetChanged | None:
        """The router names its fleet (empty: it does not know yet); the change, if it is one."""
        former, is_renamed = self.name, self._named_by == self._link.instance
        if not fleet:
            return None
        self._named_by = self._link.instance
        if former in ("", fleet) or (is_renamed and not self.is_bound):
            self._trusted = fleet if self._trusted == former else self._trusted
            if former not in ("", fleet):
                self._rename(former, fleet)
            self.name = fleet
            return None
        if not self.is_bound:
            self.name = fleet
        return FleetChanged(former, fleet)

    def _rename(self, former: str, fleet: str) -> None:
        self._renamed.pop(fleet, None)
        for name in (former, *(old for old, new in self._renamed.items() if new == former)):
            self._renamed[name] = fleet

    def holds_back(self, request: OpenRequest) -> bool:
        """Whether it waits until the router has named its fleet."""
        if not self.is_in_doubt:
            return False
        if self.is_bound:
            return request.ask.kind not in READ_ONLY
        match request.ask.body:
            case CloseSession():
                return True  # after the session was opened again, or it would stay open
            case OpenSession(worker=worker):
                return bool(worker)
            case _:
                return request.ask.route == STORE or is_of_one_fleet(request)


def is_of_one_fleet(request: OpenRequest) -> bool:
    """Whether another fleet must not go on with it.

    It has tokens, is a turn of a session, names a version, or is about what was begun there.
    """
    ask = request.ask
    has_tokens = request.is_generate and request.assembly.n_tokens > 0
    is_turn = ask.place is not None and bool(ask.place.session)
    is_stored = isinstance(ask.body, LoadLora) and not ask.body.path
    is_begun = is_stored or ask.kind in OF_WHAT_WAS_BEGUN
    return has_tokens or is_turn or is_begun or names_version(ask)


def names_version(ask: Ask) -> bool:
    """Whether it counts in versions of a fleet: zero is every fleet's."""
    if ask.kind == "restore_version":
        return True
    kind, _, number = ("any" if ask.place is None else ask.place.versions).partition(":")
    return kind == "max-staleness" or (kind in ("min", "exact") and number != "0")
