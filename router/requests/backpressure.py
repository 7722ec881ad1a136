"""Clients that do not acknowledge their endings: they get no new work, and nobody else notices.

An ending waits in its worker's outbox until its client has it, and is sent again every few seconds.
Spec: docs/protocol.md, "Overload".
"""

from collections import Counter

from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.router.context import Context, refusal
from rolloutbus.router.members.clients import ClientRecord

MAX_ENDINGS = 8192
MAX_BYTES = 512 << 20
"""Of one client, at all workers together."""
MAX_NAMES = 2
"""A principal may have so many times that, under all its names."""
SMALL = 256
"""Workers with fewer endings than that, of all clients together, are not counted."""
RETRY_MS = 1000


class Backlogs:
    """Who has too much waiting for it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._clients: dict[str, str] = {}
        """Name -> what waits, as a sentence; of principals likewise."""
        self._principals: dict[str, str] = {}

    def problem_of(self, client: ClientRecord) -> Problem | None:
        """Why this client gets no new work, if it does not."""
        if not (self._clients or self._principals):
            return None
        why = self._clients.get(client.name) or self._principals.get(client.principal)
        if why is None:
            return None
        return refusal("busy", why, retry_after_ms=RETRY_MS)

    def tick(self) -> None:
        """Look at what the workers said last."""
        n_endings, n_bytes = Counter[str](), Counter[str]()
        for worker in self._context.members:
            if len(worker.outbox) >= SMALL:
                n_endings.update(worker.outbox.values())
            if worker.backlog:
                n_bytes.update(worker.backlog)
        if not n_endings and not n_bytes:
            self._clients, self._principals = {}, {}
            return
        self._clients = _too_much(n_endings, n_bytes, 1, "this client")
        named = self._context.clients.named
        of_principals = Counter[str](), Counter[str]()
        for counts, sums in zip((n_endings, n_bytes), of_principals, strict=True):
            for name, count in counts.items():
                client = named(name)
                sums[client.principal if client is not None else name] += count
        self._principals = _too_much(*of_principals, MAX_NAMES, "the clients of this key")


def _too_much(
    n_endings: Counter[str], n_bytes: Counter[str], times: int, who: str
) -> dict[str, str]:
    return {
        name: f"{who} did not acknowledge {n_endings[name]} endings of {n_bytes[name] >> 20} MiB; "
        f"{times * MAX_ENDINGS} and {times * MAX_BYTES >> 20} MiB may wait: acknowledge them first"
        for name in {*n_endings, *n_bytes}
        if n_endings[name] >= times * MAX_ENDINGS or n_bytes[name] >= times * MAX_BYTES
    }
