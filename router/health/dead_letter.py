"""A request that killed engines, as it is kept for people."""

import msgspec


class DeadLetter(msgspec.Struct, frozen=True):
    """One poisonous request."""

    rid: str
    client: str
    reason: str
    body: msgspec.Raw
    """Its `Generate` as last sent; an empty map when it was too large, or never seen here."""
