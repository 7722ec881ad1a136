"""Principals: what stands behind a public key, and what its role may do, send and read.

Spec: docs/protocol.md, "Security".
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, get_args

import msgspec
import xxhash

from rolloutbus.bus.security.keys import KEY_BYTES, check_public_key
from rolloutbus.bus.wire.codec import pack, topic_of
from rolloutbus.bus.wire.commands import ENDINGS, sent_by
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.limits import MAX_PATTERNS, MAX_PRINCIPALS, MAX_PRIORITY
from rolloutbus.bus.wire.messages.membership import AllowedKey, HandedKeys
from rolloutbus.bus.wire.validation import check_name

Role = Literal["client", "trainer", "worker", "store", "subscriber", "admin"]
Newcomer = Literal["newcomer"]
"""Who holds an invitation, until it has a key of its own: see `bus.security.invites`."""
Door = Literal["frontend", "backend", "stream", "bulk", "tap"]

ROLES: tuple[Role, ...] = get_args(Role)

ROLES_AT: dict[str, frozenset[str]] = {
    "frontend": frozenset({"client", "trainer", "subscriber", "admin", "newcomer"}),
    "backend": frozenset({"worker", "store", "newcomer"}),
    "stream": frozenset({"client", "trainer", "subscriber", "admin"}),
    "bulk": frozenset({"worker", "trainer", "admin"}),
    "tap": frozenset({"subscriber", "admin"}),
}
"""Kind of socket -> the roles that may connect to it at all."""

_PRESENCE = frozenset({"hello", "client_beat", "goodbye"})
_MEMBER = ENDINGS | {"hello", "beat", "goodbye", "accepted", "rejected"}

KINDS_OF: dict[str, frozenset[str]] = {
    "subscriber": _PRESENCE | sent_by("subscriber"),
    "client": _PRESENCE | sent_by("client") | {"ack"},
    "trainer": _PRESENCE | sent_by("trainer") | {"ack", "rejected"},
    "admin": _PRESENCE | sent_by("admin") | {"ack", "rejected"},
    "worker": _MEMBER | {"prefixes"},
    "store": _MEMBER,
    "newcomer": frozenset({"enrol"}),  # which is answered before a core hears of it
}
"""Role -> the kinds of entries that it may send to a router."""

BULK_KINDS_OF: dict[str, frozenset[str]] = {
    "worker": frozenset({"pull_manifest", "pull_delta", "pull_chunk"}),
    "trainer": frozenset({"push_chunk", "pull_manifest"}),
    "admin": frozenset({"push_chunk", "pull_manifest"}),
}
"""Role -> the kinds of entries that it may send to a bulk socket."""


class Principal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of the allow-list."""

    key: str
    """Public key, 64 hexadecimal digits."""
    name: str
    """For people; two keys of one name are two keys of one principal, as during a rotation."""
    role: Role | Newcomer
    actors: list[str] = []
    """Names that it may take on the bus, and so the ids of its requests, `<name>/<n>`; one that
    ends with `*` stands for all that begin so. Empty: its own name, and that name, a `-` and
    more."""
    sessions: list[str] = []
    """Names of the sessions that it may use, likewise; empty: any."""
    priorities: tuple[int, int] = (0, 0)
    """Lowest and highest priority that its requests may have: a higher one goes before everybody
    else's requests, so it is a right."""

    def __post_init__(self) -> None:
        check_public_key(self.key)
        if len(self.actors) > MAX_PATTERNS or len(self.sessions) > MAX_PATTERNS:
            raise SettingsError(f"{self.name}: at most {MAX_PATTERNS} actors and sessions each")
        low, high = self.priorities
        if not -MAX_PRIORITY <= low <= 0 <= high <= MAX_PRIORITY:
            raise SettingsError(
                f"{self.name}: priorities are [lowest, highest], from -{MAX_PRIORITY} to 0 and "
                f"from 0 to {MAX_PRIORITY}, not [{low}, {high}]"
            )
        patterns = [each.removesuffix("*") or "x" for each in (*self.actors, *self.sessions)]
        for each in (self.name, *patterns):
            problem = check_name(each)
            if problem is not None:
                raise SettingsError(problem.message)

    @property
    def actor_patterns(self) -> list[str]:
        """Names it may take; a trailing `*` stands for anything."""
        return self.actors or [self.name, f"{self.name}-*"]

    def may_be(self, actor: str) -> bool:
        """Whether it may take this name on the bus."""
        return _matches(self.actor_patterns, actor)

    def may_use(self, session: str) -> bool:
        """Whether it may use this session."""
        return not self.sessions or _matches(self.sessions, session)


Principals = dict[str, Principal]
"""Public key -> whose it is."""


def by_key(principals: Iterable[Principal]) -> Principals:
    """The table that doors and routers look in.

    Raises:
        SettingsError: a key twice, or two principals could take one name.
    """
    table: Principals = {}
    principals = list(principals)
    if len(principals) > MAX_PRINCIPALS:
        raise SettingsError(f"{len(principals)} keys; at most {MAX_PRINCIPALS} may be let in")
    for each in principals:
        if each.key in table:
            raise SettingsError(f"{each.name} and {table[each.key].name} have the same key")
        table[each.key] = each
    _refuse_overlaps(table)
    return table


def handed(principals: Iterable[Principal]) -> HandedKeys:
    """The allow-list as a router hands it to members: without those who are only invited."""
    keys = [
        AllowedKey(each.key, each.name, each.role, each.actors, each.sessions, each.priorities)
        for each in sorted(principals, key=lambda each: each.key)
        if each.role != "newcomer"
    ]
    return HandedKeys(xxhash.xxh3_128_hexdigest(bytes(pack(HandedKeys("", keys)))), keys)


def principals_in(keys: HandedKeys) -> Principals:
    """The table that a member looks in.

    Raises:
        SettingsError: this is no allow-list.
    """
    try:
        return by_key(msgspec.convert(msgspec.to_builtins(keys.keys), list[Principal]))
    except msgspec.ValidationError as error:
        raise SettingsError(f"the allow-list that was handed over: {error}") from error


def _refuse_overlaps(table: Principals) -> None:
    """Refuse two principals that could take one name: requests and leases belong to names."""
    claims = {
        (p.removesuffix("*"), p[-1] != "*", o.name)
        for o in table.values()
        for p in o.actor_patterns
    }
    covering: list[tuple[str, str]] = []
    exact: tuple[str, str] | None = None
    for text, is_exact, owner in sorted(claims):  # of equal texts those that end with `*` first
        while covering and not text.startswith(covering[-1][0]):
            covering.pop()
        rivals = {other for _, other in covering}
        if exact is not None and exact[0] == text:
            rivals.add(exact[1])
        for other in rivals - {owner}:
            raise SettingsError(f"{owner} and {other} could both be called {text!r}")
        if is_exact:
            exact = (text, owner)
        else:
            covering.append((text, owner))


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(
        name.startswith(each[:-1]) if each.endswith("*") else name == each for each in patterns
    )


VERSION = b"1.0"
ALLOWED, REFUSED, MISPLACED = b"200", b"400", b"500"
"""`MISPLACED`: the key is known, but its role has no place at this socket. Who connects is told."""
QUESTION_FRAMES = 8
"""Delimiter, version, request id, domain, address, routing id, mechanism, key."""


def answer(
    question: Sequence[bytes], principals: Mapping[str, Principal], also: Collection[str] = ()
) -> list[bytes]:
    """The frames of the answer, delimiter first.

    Args:
        question: the frames as they came, delimiter first.
        principals: public key -> whose it is.
        also: keys that are let in everywhere although nobody's: see `zmq_proof`.

    Returns:
        Status 200 with the key in hexadecimal digits as the `User-Id`, 500 to a key whose role has
        no place here, or 400.
    """
    status, key = _judged(question, principals, also)
    request_id = question[2] if len(question) > 2 else b""  # noqa: PLR2004 - its place
    text = b"OK" if key else b"not allowed"
    return [b"", VERSION, request_id, status, text, key.encode(), b""]


def user_in(reply: Sequence[bytes]) -> str:
    """Key that an answer lets in; empty if it refuses."""
    return reply[5].decode()


def knocker(question: Sequence[bytes]) -> tuple[str, str] | None:
    """(door, key in hexadecimal digits) of a question; None if it cannot be read."""
    if len(question) != QUESTION_FRAMES or len(question[7]) != KEY_BYTES:
        return None
    return question[3].decode("ascii", "replace"), question[7].hex()


def _judged(
    question: Sequence[bytes], principals: Mapping[str, Principal], also: Collection[str]
) -> tuple[bytes, str]:
    """(status, the key if it may come in, else nothing)."""
    if len(question) != QUESTION_FRAMES:
        return REFUSED, ""
    delimiter, version, _, domain, _, _, mechanism, key = question
    if (delimiter, version, mechanism) != (b"", VERSION, b"CURVE") or len(key) != KEY_BYTES:
        return REFUSED, ""
    shown = key.hex()
    if shown in also:
        return ALLOWED, shown
    principal, roles = principals.get(shown), ROLES_AT.get(domain.decode("ascii", "replace"))
    if principal is None or roles is None:
        return REFUSED, ""
    return (ALLOWED, shown) if principal.role in roles else (MISPLACED, "")


CLAIM = b"client:"
READS_EVERYTHING = frozenset({"subscriber", "admin"})
"""Roles that watch a fleet."""


def claim_of(client: str) -> bytes:
    """Subscription by which a guarded publisher is asked for the rows of this client."""
    return CLAIM + client.encode()


def is_claim(asked: bytes) -> bool:
    """Whether a subscription names a client."""
    return asked.startswith(CLAIM)


def granted(principal: Principal, asked: bytes) -> bytes | None:
    """The topic, or beginning of topics, that a subscription gets; None: nothing."""
    sees_everything = principal.role in READS_EVERYTHING
    if not is_claim(asked):
        return asked if sees_everything else None
    client = asked.removeprefix(CLAIM).decode("ascii", "replace")
    if check_name(client) is None and (sees_everything or principal.may_be(client)):
        return topic_of(client)
    return None
