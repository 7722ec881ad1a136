"""What an actor says while it cannot reach its router: at once, and again every 10 s.

Pure: time comes with every call. Spec: docs/protocol.md, "Membership".
"""

from typing import Literal

LinkFailure = Literal["no-answer", "other-key", "unknown-key", "wrong-role"]
"""Why a connection did not come to be: nobody listens or answers; somebody does, without proof of
the key that is expected; ours is in no allow-list; it is, but its role has no place there."""

SAY_AGAIN_S = 10.0


class Patience:
    """Decides when to say that a router is waited for, and what."""

    def __init__(self, address: str, role: str) -> None:
        """`role`: what the key must be for, such as `a worker`."""
        self._address = address
        self._role = role
        self._said = ""
        self._say_at = 0.0

    def failed(self, why: LinkFailure, now: float) -> str:
        """A connection has failed; returns a sentence if it is time for one, else nothing."""
        sentence = sentence_of(why, self._address, self._role)
        if sentence == self._said and now < self._say_at:
            return ""
        self._said, self._say_at = sentence, now + SAY_AGAIN_S
        return f"{sentence}; trying again"

    def joined(self) -> None:
        """The router has answered: nothing is waited for."""
        self._said = ""


def sentence_of(why: LinkFailure, address: str, role: str) -> str:
    """The same for people; `role` is what the key must be for, such as `a client`."""
    where = address.partition("#")[0]
    match why:
        case "no-answer":
            return f"no router answers at {where}"
        case "other-key":
            return f"what answers at {where} does not hold the router's key that was given"
        case "unknown-key":
            return f"the router at {where} does not know this key: let it in with `rolloutbus keys`"
        case "wrong-role":
            return f"this key is not {role}'s: the router at {where} knows it in another role"
