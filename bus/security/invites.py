"""Invitations: a token that lets one new key in, once, until a time.

A token holds the secret half of a key pair of its own. The allow-list keeps the public half, so a
connection proves the token as it would prove any key: no secret is sent, kept or compared.
Spec: docs/protocol.md, "Security", 15.
"""

import base64
import contextlib
from collections.abc import Sequence
from typing import Annotated

import msgspec
import xxhash

from rolloutbus.bus.security.keys import KEY_BYTES, check_public_key, is_public_key
from rolloutbus.bus.security.principals import Principal, Role, by_key
from rolloutbus.bus.wire.errors import Refused, SettingsError
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.validation import check_name

PREFIX = "rolloutbus-"
CHECKSUM_BYTES = 4
MAX_TOKEN_CHARS = 2000
REMEMBERED_S = 7 * 24 * 3600
"""An invitation that has expired is remembered so long, to say that it has."""


class Invite(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One invitation of the allow-list: rights as of `Principal`, for a key to come."""

    key: str
    """Public half of the token's own pair."""
    expires_at: int
    """Seconds since 1970."""
    name: str
    role: Role
    actors: list[str] = []
    sessions: list[str] = []
    priorities: tuple[int, int] = (0, 0)
    used_by: str = ""
    """Public key that was let in; empty: none yet."""

    def __post_init__(self) -> None:
        check_public_key(self.key)
        self.principal(self.key)  # raises if these are no rights

    def principal(self, key: str) -> Principal:
        """Whose the key is that this lets in."""
        return Principal(key, self.name, self.role, self.actors, self.sessions, self.priorities)


class KeyList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """All that the file of an allow-list holds."""

    principals: list[Principal] = []
    invites: list[Invite] = []


def enrolled(listed: KeyList, invite_key: str, key: str, now_s: float) -> KeyList:
    """The list in which `key` has the rights of an invitation; the same list if it has them.

    Args:
        listed: the list as it is.
        invite_key: what the connection has proved to hold.
        key: what is to be let in.
        now_s: seconds since 1970.

    Raises:
        Refused: `invite_unknown`, `invite_expired`, `invite_used`, or `bad_request`: no key, or one
            that somebody has. Nothing is to be changed.
    """
    invite = next((each for each in listed.invites if each.key == invite_key), None)
    if invite is None:
        raise Refused(
            Problem(
                "invite_unknown",
                "this invitation was withdrawn: ask for another one",
                "not_started",
            )
        )
    if invite.used_by:
        if invite.used_by == key:
            return listed  # the answer was lost, and it asks again
        why = (
            f"this invitation was used before, by the key {invite.used_by}; if that is none of "
            f"yours, have it revoked (`rolloutbus keys revoke {invite.used_by}`)"
        )
        raise Refused(Problem("invite_used", why, "not_started"))
    if now_s >= invite.expires_at:
        raise Refused(
            Problem(
                "invite_expired", "this invitation has expired: ask for another one", "not_started"
            )
        )
    if not is_public_key(key) or any(each.key == key for each in listed.principals):
        raise Refused(
            Problem(
                "bad_request",
                "this is no public key, or one that has rights already",
                "not_started",
            )
        )
    used = msgspec.structs.replace(invite, used_by=key)
    return KeyList(
        [*listed.principals, invite.principal(key)],
        [used if each is invite else each for each in listed.invites],
    )


def with_invite(listed: KeyList, invite: Invite) -> KeyList:
    """The list with one more invitation, which replaces an open one of the same name.

    Raises:
        SettingsError: the name has a key, or somebody else may take its names.
    """
    if any(each.name == invite.name for each in listed.principals):
        raise SettingsError(
            f"{invite.name} has a key already: revoke it first, or name another one"
        )
    kept = [each for each in listed.invites if each.name != invite.name or each.used_by]
    by_key([*listed.principals, invite.principal(invite.key)])
    return KeyList(listed.principals, [*kept, invite])


def without_old(invites: Sequence[Invite], now_s: float) -> list[Invite]:
    """Those of which it is still worth saying what became of them."""
    return [each for each in invites if now_s < each.expires_at + REMEMBERED_S]


KeyBytes = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class Token(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of an invitation's token, for one new host.

    Whoever reads it before it is used can take that host's place.
    """

    secret: KeyBytes
    """Of the token's own pair."""
    router_key: KeyBytes
    expires_at: int
    """Seconds since 1970."""
    name: str
    role: Role
    frontend: str
    """Where clients connect; empty: not known."""
    backend: str
    """Where workers and the store connect; empty: not known."""

    def __post_init__(self) -> None:
        problem = check_name(self.name)
        if problem is not None:
            raise SettingsError(problem.message)
        # Whoever uses a token names files after it: none may lie elsewhere, or be the router's.
        if "/" in self.name or self.name.startswith(".") or self.name == "router":
            raise SettingsError(
                f"{self.name!r} cannot be invited: the new key's files are named so, thus without "
                "'/', without '.' at the beginning, and not 'router'"
            )

    @property
    def address(self) -> str:
        """Where the new key's owner will connect; empty: not known."""
        return self.backend if self.role in ("worker", "store") else self.frontend

    def text(self) -> str:
        """One word without spaces."""
        return text_of(msgspec.msgpack.encode(self))

    def __repr__(self) -> str:
        return f"Token({self.name!r})"


def text_of(content: bytes) -> str:
    """A token's content as one word, in which a copy that is not whole shows."""
    whole = content + xxhash.xxh32_digest(content)
    return PREFIX + base64.urlsafe_b64encode(whole).decode().rstrip("=")


def read_token(text: str) -> Token:
    """What a token says; see `Token.text`.

    Raises:
        Refused: `invite_malformed`: it is none, or not the whole of one; its text is not repeated.
        SettingsError: its name cannot be that of a file.
    """
    word = text.strip()
    encoded = word.removeprefix(PREFIX)
    if encoded != word and len(word) <= MAX_TOKEN_CHARS:
        with contextlib.suppress(ValueError):
            padded = encoded + "=" * (-len(encoded) % 4)
            whole = base64.b64decode(padded, b"-_", validate=True)
            content, check = whole[:-CHECKSUM_BYTES], whole[-CHECKSUM_BYTES:]
            if xxhash.xxh32_digest(content) == check:
                return msgspec.msgpack.decode(content, type=Token)
    why = "this is no token, or not the whole of one: copy all that `keys invite` has printed"
    raise Refused(Problem("invite_malformed", why, "not_started"))
