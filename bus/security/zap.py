"""Who may come in, as libzmq asks it (RFC 27, ZAP): one pure answer to anything at all.

A question that goes unanswered locks everybody out, and an answer by accident lets anybody in;
so this never raises, and whatever is not plainly allowed is refused.
"""

from collections.abc import Collection, Mapping, Sequence

from bus.security.keys import KEY_BYTES
from bus.security.principals import ROLES_AT, Principal

VERSION = b"1.0"
ALLOWED, REFUSED = b"200", b"400"
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
        Status 200 with the key in hexadecimal digits as the `User-Id`, or 400.
    """
    key = _admitted(question, principals, also)
    request_id = question[2] if len(question) > 2 else b""  # noqa: PLR2004 - its place
    status, text = (ALLOWED, b"OK") if key else (REFUSED, b"not allowed")
    return [b"", VERSION, request_id, status, text, key.encode(), b""]


def user_in(reply: Sequence[bytes]) -> str:
    """Whom an answer lets in; empty for nobody."""
    return reply[5].decode()


def _admitted(
    question: Sequence[bytes], principals: Mapping[str, Principal], also: Collection[str]
) -> str:
    """The key if it may come in, else nothing."""
    if len(question) != QUESTION_FRAMES:
        return ""
    delimiter, version, _, domain, _, _, mechanism, key = question
    if (delimiter, version, mechanism) != (b"", VERSION, b"CURVE") or len(key) != KEY_BYTES:
        return ""
    shown = key.hex()
    if shown in also:
        return shown
    principal = principals.get(shown)
    roles = ROLES_AT.get(domain.decode("ascii", "replace"), frozenset[str]())
    return shown if principal is not None and principal.role in roles else ""
