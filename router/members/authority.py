"""What each principal may say: an entry that its role does not allow goes no further.

Who sent a frame is known from its key; that it may send at all, the port has checked. That the rid
of a command bears the name of its client, the desks check; whose name that may be is checked here,
at the hello. Spec: docs/protocol.md, "Security".
"""

from collections import OrderedDict
from collections.abc import Callable

from rolloutbus.bus.actor.ref import worker
from rolloutbus.bus.security.principals import KINDS_OF, READS_EVERYTHING, Principal
from rolloutbus.bus.transport.endpoints import split_key
from rolloutbus.bus.wire.codec import pack, unpack_as
from rolloutbus.bus.wire.commands import COMMANDS, ENDINGS, KINDS
from rolloutbus.bus.wire.entry import Entry, Peer
from rolloutbus.bus.wire.errors import RemoteProtocolError, SettingsError
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import CloseSession, OpenSession, Repair
from rolloutbus.bus.wire.messages.membership import Hello, served_by
from rolloutbus.router.context import Context
from rolloutbus.router.members.clients import ClientRecord
from rolloutbus.router.members.membership import Membership

OFFENCES = 10
"""Malformed messages of one connection within WINDOW_S that end it."""
WINDOW_S = 60.0
SHUNNED_S = 60.0
"""A dismissed connection that said nothing for so long is heard again."""
REMEMBERED = 10_000
"""Connections on either list; whoever opens many pushes their own oldest ones out."""


class Offences:
    """Ends connections that lost their rights or break the protocol again and again.

    A dismissed connection is its peer's to close; one that goes on is ignored instead.
    Spec: docs/protocol.md, "Limits".
    """

    def __init__(
        self, context: Context, membership: Membership, leave: Callable[[ClientRecord], None]
    ) -> None:
        """`leave` ends what a client has here."""
        self._context = context
        self._membership = membership
        self._leave = leave
        self._counted: OrderedDict[Peer, tuple[int, float]] = OrderedDict()
        """connection -> (offences, when the window began)."""
        self.shunned: OrderedDict[Peer, float] = OrderedDict()
        """Dismissed connections, and when each was last heard; seldom anything but empty."""

    def expel(self, peer: Peer, code: str, why: str, now: float) -> None:
        """End a connection, and what it held here."""
        member = self._context.members.at(peer)
        client = self._context.clients.at(peer)
        self._membership.dismiss(peer, code, why)
        if client is not None:
            self._leave(client)
        elif member is not None:
            self._membership.expel(member, why, now)

    def offended(self, peer: Peer, now: float) -> bool:
        """Count a malformed message; a peer that sends many is expelled. Returns whether it was."""
        self._context.count("malformed")
        if not self._must_go(peer, now):
            return False
        self._context.count("offenders_dismissed")
        self.expel(peer, "protocol", "too many malformed messages; see the protocol", now)
        return True

    def is_shunned(self, peer: Peer, now: float) -> bool:
        """Whether what this connection says is dropped unread."""
        heard_at = self.shunned.pop(peer, None)
        if heard_at is None or now - heard_at > SHUNNED_S:
            return False
        self.shunned[peer] = now
        return True

    def tick(self, now: float) -> None:
        """Forget connections that fell silent."""
        while self.shunned and now - next(iter(self.shunned.values())) > SHUNNED_S:
            self.shunned.popitem(last=False)
        while self._counted and now - next(iter(self._counted.values()))[1] > WINDOW_S:
            self._counted.popitem(last=False)

    def _must_go(self, peer: Peer, now: float) -> bool:
        """Count one more offence of this connection."""
        n, since = self._counted.pop(peer, (0, now))
        if now - since > WINDOW_S:
            n, since = 0, now
        if n + 1 < OFFENCES:
            self._counted[peer] = (n + 1, since)
            if len(self._counted) > REMEMBERED:
                self._counted.popitem(last=False)
            return False
        self.shunned[peer] = now
        if len(self.shunned) > REMEMBERED:
            self.shunned.popitem(last=False)
        return True


ROLES_THAT_ARE: dict[str, frozenset[str]] = {
    "client": frozenset({"client", "trainer", "subscriber", "admin"}),
    "worker": frozenset({"worker"}),
    "store": frozenset({"store"}),
    "router": frozenset({"subscriber", "admin"}),
}
"""Role in a hello -> the roles of keys that may say it."""

ONE_WORKER = worker("")

Check = Callable[[Principal, Entry], str]
"""Why a principal may not send this entry; empty if it may."""


def _never(principal: Principal, entry: Entry) -> str:
    if entry.kind not in KINDS and entry.kind not in ENDINGS:
        return ""  # nobody can say it: whoever reads it answers that it is unknown
    return f"a {principal.role} may not send {entry.kind!r}"


def _hello(principal: Principal, entry: Entry) -> str:
    hello = unpack_as(Hello, entry)
    if principal.role not in ROLES_THAT_ARE[hello.role]:
        return f"the key of {principal.name!r} is for a {principal.role}, not for a {hello.role}"
    if not principal.may_be(hello.name):
        return f"the key of {principal.name!r} may not be used as {hello.name[:64]!r}"
    if any(_key_in(served) != principal.key for served in served_by(hello)):
        return "the endpoint that it serves must carry its own key"
    return ""


def _key_in(endpoint: str) -> str:
    try:
        return split_key(endpoint)[1]
    except SettingsError:
        return ""


def _repair(principal: Principal, entry: Entry) -> str:
    rid = unpack_as(Repair, entry).rid
    if not entry.route.startswith(ONE_WORKER):
        return "a repair is asked of one worker"  # of all, a small question would be much work
    if principal.role in READS_EVERYTHING or principal.may_be(rid.rpartition("/")[0]):
        return ""
    return f"{rid[:96]!r} is not a request of {principal.name!r}"


def _session(principal: Principal, entry: Entry) -> str:
    if entry.kind == "generate":
        session = entry.place.session if entry.place is not None else ""
    elif entry.kind == "open_session":
        session = unpack_as(OpenSession, entry).session
    else:
        session = unpack_as(CloseSession, entry).session
    if not session or principal.may_use(session):
        return ""
    return f"{principal.name!r} may not use session {session[:64]!r}"


def _checks(role: str, *, has_own_sessions: bool) -> dict[str, Check | None]:
    closer: dict[str, Check] = {"hello": _hello, "repair": _repair}
    if has_own_sessions:
        closer |= dict.fromkeys(("generate", "open_session", "close_session"), _session)
    return {kind: closer.get(kind) for kind in KINDS_OF[role]}


_ANY_SESSION = {role: _checks(role, has_own_sessions=False) for role in KINDS_OF}
_OWN_SESSIONS = {role: _checks(role, has_own_sessions=True) for role in KINDS_OF}


class Authority:
    """Screens what comes from known principals, and answers what it keeps back."""

    def __init__(self, context: Context, expel: Callable[[Peer, str, str, float], None]) -> None:
        """`expel` ends a connection: (peer, code, why, now)."""
        self._context = context
        self._expel = expel

    def screen(
        self, peer: Peer, principal: Principal, entries: list[Entry], now: float
    ) -> list[Entry]:
        """The entries that may be heeded; usually all of them, at one look-up each."""
        checks = (_OWN_SESSIONS if principal.sessions else _ANY_SESSION)[principal.role]
        look_up = checks.get
        for entry in entries:
            if look_up(entry.kind, _never) is not None:
                break
        else:
            return entries
        return [
            entry for entry in entries if not self._is_refused(peer, principal, entry, checks, now)
        ]

    def _is_refused(
        self,
        peer: Peer,
        principal: Principal,
        entry: Entry,
        checks: dict[str, Check | None],
        now: float,
    ) -> bool:
        check = checks.get(entry.kind, _never)
        try:
            why = check(principal, entry) if check is not None else ""
        except RemoteProtocolError:
            return False  # malformed, whoever sends it: its reader says so
        if not why:
            return False
        self._context.count("forbidden")
        if entry.rid and entry.kind in COMMANDS:
            body = pack(Problem("forbidden", why, "not_started"))
            self._context.out.send(peer, Entry("refused", entry.rid, body=body))
        else:
            self._expel(peer, "forbidden", why, now)
        return True
