"""The asking side of a bulk socket: requests that are asked again until they are answered.

Every request there may be repeated, so a lost link, a lost answer and a slow one have one cure:
ask again, on a fresh link if need be. Spec: docs/protocol.md, "Weights".
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Self

import msgspec

from rolloutbus.bus.backoff import RECONNECT_FIRST_S, RECONNECT_MAX_S, Backoff
from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.transport.endpoints import HOW_TO_BE_REACHED
from rolloutbus.bus.transport.zmq_ports import DealerPort
from rolloutbus.bus.wire.codec import pack, unpack, unpack_result
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import EngineFailed, PeerLost, RemoteProtocolError
from rolloutbus.bus.wire.messages.endings import Problem

WINDOW = 8
"""Chunks under way at once: enough to hide the way there and back, little enough to wait behind."""
ANSWER_S = 5.0
"""Without any answer for so long the link is given up."""
UNREACHED_S = 15.0
"""Without ever having had an answer for so long, a patient link is given up, too. A store that is
being started again is back by then."""
SILENT_S = 2 * ANSWER_S
"""Without any answer for so long a source that is not the only one is left."""


class BulkLink:
    """Use as `async with`; lives on one event loop."""

    def __init__(
        self, endpoint: str, dialer: Dialer | None = None, *, is_patient: bool = True
    ) -> None:
        """Ask at `endpoint`, with the keys of `dialer` if it asks for any.

        A link that is not patient never comes back: when it ends, or is silent for SILENT_S, so
        does all that is asked over it. A patient one does when nobody answers for UNREACHED_S.
        """
        self._endpoint = endpoint
        self._dialer = dialer.exact if dialer is not None else None
        self._backoff = Backoff(RECONNECT_FIRST_S, RECONNECT_MAX_S, random.SystemRandom())
        self._open: dict[str, tuple[Entry, asyncio.Future[msgspec.Struct]]] = {}
        self._n_asked = 0
        self._port: DealerPort | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._is_patient = is_patient
        self._is_lost = False
        self._has_answered = False
        self._opened_at = 0.0
        self._silence_from = 0.0
        """When something was heard last, or had to be expected."""
        self.n_reconnects = 0

    async def __aenter__(self) -> Self:
        """Connect in the background."""
        self._loop = asyncio.get_running_loop()
        self._opened_at = self._loop.time()
        self._connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Drop the link; requests under way are cancelled."""
        if self._retry is not None:
            self._retry.cancel()
        self._drop()
        for _asked, future in self._open.values():
            future.cancel()

    async def ask(self, kind: str, body: msgspec.Struct) -> msgspec.Struct:
        """One request, repeated until it is answered; the caller sets the deadline.

        Raises:
            EngineFailed: the other side cannot; see `.code`.
            PeerLost: the link has ended and is not patient, or nobody has ever answered there.
        """
        if self._is_lost:
            raise self._loss()
        if not self._open:
            self._silence_from = self._loop.time()
        self._n_asked += 1
        rid = str(self._n_asked)
        entry = Entry(kind, rid, body=pack(body))
        future: asyncio.Future[msgspec.Struct] = self._loop.create_future()
        self._open[rid] = (entry, future)
        self._send(entry)
        try:
            limit_s = ANSWER_S if self._is_patient else SILENT_S
            while not future.done():
                left_s = self._silence_from + limit_s - self._loop.time()
                if left_s <= 0:
                    self._link_down()
                else:
                    await asyncio.wait((future,), timeout=left_s)
            return future.result()
        finally:
            del self._open[rid]

    async def ask_all(
        self, asks: Iterable[Callable[[], Awaitable[None]]], window: int = WINDOW
    ) -> None:
        """Carry out many small conversations, at most `window` of them at once.

        Raises:
            BusError: the first failure; the others are cancelled.
        """
        waiting = iter(asks)

        async def lane() -> None:
            for each in waiting:
                await each()

        try:
            async with asyncio.TaskGroup() as lanes:
                for _ in range(window):
                    lanes.create_task(lane())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _connect(self) -> None:
        self._retry = None
        self._silence_from = self._loop.time()
        self._port = DealerPort(
            self._endpoint, self._answered, self._link_down, dialer=self._dialer
        )
        for entry, future in self._open.values():
            if not future.done():
                self._send(entry)

    def _send(self, entry: Entry) -> None:
        if self._port is not None:
            self._port.send(entry)

    def _drop(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None

    def _loss(self) -> PeerLost:
        address = self._endpoint.partition("#")[0]
        if self._has_answered or not self._is_patient:
            return PeerLost(f"{address} does not answer")
        return PeerLost(f"{address} cannot be reached from this host: {HOW_TO_BE_REACHED}")

    def _link_down(self) -> None:
        self._drop()
        self._silence_from = now = self._loop.time()
        is_out_of_reach = not self._has_answered and now - self._opened_at > UNREACHED_S
        if not self._is_patient or is_out_of_reach:
            self._is_lost = True
            for _, future in self._open.values():
                if not future.done():
                    future.set_exception(self._loss())
        elif self._retry is None:
            self.n_reconnects += 1
            self._retry = self._loop.call_later(self._backoff.next_s(), self._connect)

    def _answered(self, entries: list[Entry]) -> None:
        self._backoff.reset()
        self._has_answered = True
        self._silence_from = self._loop.time()
        for entry in entries:
            _, future = self._open.get(entry.rid, (None, None))
            if future is None or future.done():
                continue
            try:
                is_done = entry.kind == "finished"
                answer = unpack_result("seal_version", entry) if is_done else unpack(entry)
            except RemoteProtocolError as error:
                future.set_exception(error)
                continue
            if isinstance(answer, Problem):
                future.set_exception(EngineFailed(answer))
            else:
                future.set_result(answer)
