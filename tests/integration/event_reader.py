"""Reads all events of a subscriber, keeps them, and waits for later ones."""

import asyncio
from collections.abc import Callable
from typing import Self, TypeVar

from rolloutbus import Rollout, RolloutClient, subscribe
from rolloutbus.bus.wire.messages.generation import FinishReason
from rolloutbus.events import Demoted, Finished, GapLost, StreamEvent, Tokens
from rolloutbus.replay.subscriber import Subscriber
from tests.integration.live_fleet import DEADLINE_S, Changes, fake_sampling

EventT = TypeVar("EventT")
LOST = -1
"""In the place of a token that will not come, as was told."""


class EventReader:
    """An async context manager. While `paused` is set its reader takes nothing."""

    def __init__(self, subscriber: Subscriber, *, is_paused: bool = False) -> None:
        self.subscriber = subscriber
        self.events: list[StreamEvent] = []
        self._held: dict[str, list[int]] = {}
        self._ends: dict[str, list[Finished]] = {}
        self._changes = Changes()
        self._may_read = asyncio.Event()
        if not is_paused:
            self._may_read.set()
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    def streams_of(cls, client: RolloutClient) -> Self:
        """What workers publish for this client, as a stranger hears it."""
        settings = client.connection.settings
        return cls(subscribe(settings.router, clients=[settings.name]))

    async def __aenter__(self) -> Self:
        await self.subscriber.__aenter__()
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.subscriber.__aexit__()
        if self._reader is not None:
            self._reader.cancel()

    def pause(self) -> None:
        """Take nothing more."""
        self._may_read.clear()

    def go_on(self) -> None:
        """Read again."""
        self._may_read.set()

    def of(self, kind: type[EventT]) -> list[EventT]:
        """Everything of a kind that was told so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def tokens(self, rid: str) -> list[int]:
        """As a reader puts them together, what became void left out."""
        return self._held.get(rid, [])

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until it is so, judged after each event; raises what the reader stumbled over."""

        def look() -> bool:
            reader = self._reader
            if reader is not None and reader.done() and not reader.cancelled():
                reader.result()
            return is_so()

        await self._changes.until(look)

    def endings(self, rid: str) -> list[FinishReason | None]:
        """How the attempts at a request ended."""
        return [end.finish_reason for end in self._ends.get(rid, [])]

    async def end(self, rid: str) -> Finished:
        """The last end of a stream, once one was told."""
        await self.until(lambda: rid in self._ends)
        return self._ends[rid][-1]

    async def whole(self, rollout: Rollout) -> None:
        """Wait for the end of this rollout, which must be all of it."""
        await self.until(lambda: any(e.finish_reason for e in self._ends.get(rollout.rid, [])))
        end = self._ends[rollout.rid][-1]
        assert end.n_missing == 0
        assert end.tokens.tolist() == rollout.tokens.tolist()
        assert end.logprobs.tolist() == rollout.logprobs.tolist()
        assert list(end.version_runs) == list(rollout.version_runs)
        assert end.finish_reason == rollout.finish_reason
        if rollout.rid in self._held and not self.of(Demoted):
            assert self._held[rollout.rid] == rollout.tokens.tolist()

    async def hears(self, client: RolloutClient, n_workers: int = 1) -> None:
        """Have the client sample until its streams come: subscriptions take effect in time."""
        name = client.connection.settings.name
        async with asyncio.timeout(DEADLINE_S):
            while len(self._workers(name)) < n_workers:
                await client.generate([1], fake_sampling(1), deadline_s=DEADLINE_S)

    def _workers(self, name: str) -> set[str]:
        ends = (end for rid, ends in self._ends.items() for end in ends if rid.startswith(name))
        return {end.worker for end in ends}

    async def hears_everyone(self, client: RolloutClient) -> None:
        """Have the client sample until all its workers are heard."""
        await self.hears(client, len(client.connection.members))

    async def _read(self) -> None:
        try:
            while True:
                await self._may_read.wait()
                self._heard(await anext(self.subscriber))
                self._changes.notify()
        except StopAsyncIteration:
            return
        finally:
            self._changes.notify()

    def _heard(self, event: StreamEvent) -> None:
        self.events.append(event)
        if isinstance(event, Tokens):
            held = self._held.setdefault(event.rid, [])
            del held[event.start :]
            assert len(held) == event.start, "a jump that nobody told of"
            held += event.tokens.tolist()
        elif isinstance(event, GapLost):
            held = self._held.setdefault(event.rid, [])
            held[event.start :] = [LOST] * (event.stop - event.start)
        elif isinstance(event, Finished):
            self._ends.setdefault(event.rid, []).append(event)
