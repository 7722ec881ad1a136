"""A session's place at a worker: opened, renewed, closed, and where it is.

Spec: docs/protocol.md, "Sessions".
"""

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, Self

import msgspec

from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import ActorStopped, MailboxFull, Refused, cannot_be_pickled
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.session import (
    CloseSession,
    OpenedSession,
    OpenSession,
    SessionMoved,
)

if TYPE_CHECKING:
    from rolloutbus.trainer_adapter.client.client import RolloutClient

PASSING = frozenset({"busy", "not_ready", "session_taken"})
"""Refusals of a place that time heals: a client that crashed keeps its places for a while."""
RETRY_S = 0.1
"""At least this long before the next try."""


@strict()
class SessionPlace:
    """Where a session's requests go, from `open` to `close`, or for an `async with`."""

    def __init__(self, client: "RolloutClient", asked: OpenSession, wait_s: float) -> None:
        self._client = client
        self._asked = asked
        self._wait_s = wait_s
        self._is_open = self._was_open = False

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(
            self, f"the router's address and the name {self.name!r}, and open it there"
        )

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """What its requests carry."""
        return self._asked.session

    @property
    def is_open(self) -> bool:
        """Whether it was opened, and not closed since."""
        return self._is_open

    @property
    def worker(self) -> str:
        """Who has its prefix; empty when the router has given its place away."""
        held = self._client.sessions.get(self.name)
        return held.worker if held is not None else ""

    @property
    def n_moved(self) -> int:
        """How often it had to change its worker, which cost it its prefix cache."""
        held = self._client.sessions.get(self.name)
        return held.n_moved if held is not None else 0

    @property
    def last_move(self) -> SessionMoved | None:
        """From where to where, and why; None if it never moved."""
        held = self._client.sessions.get(self.name)
        return held.last_move if held is not None else None

    async def open(self) -> Self:
        """Take a place, for whom an `async with` is too short; `close` gives it back.

        Raises:
            Refused: as `RolloutClient.session`.
        """
        self._client.connection.require_home()
        try:
            await self._admitted()
        except Refused:
            self._let_go()
            raise
        except BaseException:
            self.close()  # it may have been opened all the same
            raise
        self._is_open = self._was_open = True
        return self

    async def renew(self) -> None:
        """Let lease and grace begin anew: what runs outside takes longer than thought.

        Raises:
            Refused: the place was free, and has gone to another session; or this one is not open.
        """
        self._require_open()
        await self._ask()

    def close(self) -> None:
        """Give the place back; what runs goes on.

        Nobody waits for the answer: who leaves because the router is away is not held up.
        """
        self._client.connection.require_home()
        self._is_open = False
        if not self._let_go():
            return  # the place is another's, or was never this one's
        deadline_s = self._client.connection.settings.control_deadline_s
        # A client that is closed has freed the place with its goodbye; else the lease will.
        with suppress(ActorStopped, MailboxFull):
            self._client.ref().tell(CloseSession(self.name), deadline_s=deadline_s)

    def _require_open(self) -> None:
        """Check that it has a place.

        Raises:
            Refused: it has none yet, or none any more.
        """
        self._require_not_closed()
        if not self._is_open:
            raise self._not_open("is not open yet: enter")

    def _require_not_closed(self) -> None:
        """Check that it has a place, or may still get one.

        Raises:
            Refused: it has none any more.
        """
        if self._was_open and not self._is_open:
            raise self._not_open("is closed: branch from")

    def _not_open(self, why: str) -> Refused:
        way = "it by `async with` or `with`, or `open()`"
        return Refused(bad_request("session", f"session {self.name[:64]!r} {why} {way}"))

    def _claim(self) -> None:
        """Be the only open one of its name in this client.

        Raises:
            Refused: another one has the place.
        """
        other = self._client.connection.session_holders.setdefault(self.name, self)
        has_lost_it = other.is_open and not other.worker
        if other is not self and not has_lost_it:
            message = f"session {self.name[:64]!r} is open in this client already: use that one,"
            message += " `branch` from it under another name, or close it first"
            raise Refused(Problem("session_taken", message, "not_started", field="session"))
        self._client.connection.session_holders[self.name] = self

    def _let_go(self) -> bool:
        """Whether the place was its own until now."""
        holders = self._client.connection.session_holders
        return holders.get(self.name) is self and holders.pop(self.name) is self

    async def _admitted(self) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._wait_s
        while True:
            try:
                self._claim()
                await self._ask()
            except Refused as error:
                retry_at = loop.time() + max(RETRY_S, error.retry_after_ms / 1000)
                if error.code not in PASSING or retry_at > give_up_at:
                    raise
                await asyncio.sleep(retry_at - loop.time())
            else:
                return

    async def _ask(self) -> None:
        deadline_s = self._client.connection.settings.control_deadline_s
        asked = msgspec.structs.replace(self._asked, worker=self.worker or self._asked.worker)
        await self._client.ref().ask_for(OpenedSession, asked, deadline_s=deadline_s)
