"""Who may come in, as libzmq asks it (RFC 27, ZAP): one pure answer to anything at all.

A question that goes unanswered locks everybody out, and an answer by accident lets anybody in;
so this never raises, and whatever is not plainly allowed is refused.
"""

from collections.abc import Collection, Mapping, Sequence

from rolloutbus.bus.security.keys import KEY_BYTES
from rolloutbus.bus.security.principals import ROLES_AT, Principal

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
    """Whom an answer lets in; empty for nobody."""
    return reply[5].decode()


def knocker(question: Sequence[bytes]) -> tuple[str, str] | None:
    """(door, key in hexadecimal digits) of who asks to be let in; None if that cannot be read."""
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
