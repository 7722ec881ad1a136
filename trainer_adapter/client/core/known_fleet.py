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
"""Commands that a client may send before the router has named its fleet."""
OF_WHAT_WAS_BEGUN = frozenset(
    {"attach", "verify_tensors", "seal_version", "publish_version", "settle_version"}
)
"""Commands that name a request or a version that a fleet gave a number to."""


class KnownFleet:
    """The fleet that a client knows; decides which requests another fleet must not get."""

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
        """Instance of the router that reported the identity."""
        self._renamed: dict[str, str] = {}
        """Temporary name that a router gave its fleet -> the fleet's older, real name."""

    @property
    def is_in_doubt(self) -> bool:
        """Whether the router has named no fleet yet, so that it may serve another one."""
        return bool(self.name) and self._named_by != self._link.instance

    @property
    def change(self) -> FleetChanged | None:
        """The fleet that answers, if it is another one than the caller knows."""
        return None if self.name == self._trusted else FleetChanged(self._trusted, self.name)

    def is_present(self, fleet: str) -> bool:
        """Whether the present fleet is the one with this name; an empty name matches any fleet."""
        return not fleet or self._renamed.get(fleet, fleet) == self.name

    def accept(self) -> None:
        """Accepts the present fleet: version numbers belong to it from now on."""
        self._trusted = self.name

    def named(self, fleet: str) -> FleetChanged | None:
        """Takes the fleet's name from the router (empty: unknown yet); returns a change or None."""
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
        """Whether the request must wait until the router has named its fleet."""
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
    """Whether another fleet must not continue the request.

    It has tokens, is a turn of a session, names a version, or is about what was begun there.
    """
    ask = request.ask
    has_tokens = request.is_generate and request.assembly.n_tokens > 0
    is_turn = ask.place is not None and bool(ask.place.session)
    is_stored = isinstance(ask.body, LoadLora) and not ask.body.path
    is_begun = is_stored or ask.kind in OF_WHAT_WAS_BEGUN
    return has_tokens or is_turn or is_begun or names_version(ask)


def names_version(ask: Ask) -> bool:
    """Whether the command names a version number of one fleet; version 0 exists in every fleet."""
    if ask.kind == "restore_version":
        return True
    kind, _, number = ("any" if ask.place is None else ask.place.versions).partition(":")
    return kind in ("min-tag", "max-staleness") or (kind in ("min", "exact") and number != "0")
