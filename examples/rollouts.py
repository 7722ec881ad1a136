"""Keeps rollouts running ahead of the trainer, hands them out in groups, and counts every one.

A group is the answers to one word. At most `(max_staleness + 1) * groups_per_step` groups are
unfinished, waiting or being trained on at any time. Since the oldest finished groups are taken
first, no token can then fall further behind than `max_staleness` updates, short of a straggler:
that one is dropped when its turn comes, and a new group takes its place.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from rolloutbus import Rollout, RolloutClient, SamplingParams
from rolloutbus.errors import BusError, Refused
from rolloutbus.examples.task import WORD_LETTERS, prompt_tokens
from rolloutbus.types import Delta

SAMPLING = SamplingParams(max_new_tokens=WORD_LETTERS, ignore_eos=True)
DEADLINE_S = 180.0
"""For one rollout, the wait for a free worker included."""
RETRY_AFTER_S = 0.5
"""Before a group takes the place of one that failed."""


@dataclass(frozen=True, slots=True)
class Group:
    """Finished rollouts of one word."""

    word: str
    rollouts: list[Rollout]

    @property
    def token_versions(self) -> NDArray[np.int64]:
        """int64 [n_tokens of all rollouts]: which weights sampled each token."""
        return np.concatenate([rollout.token_versions for rollout in self.rollouts])


@dataclass(slots=True)
class Ledger:
    """What was asked for and what came of it."""

    n_requested: int = 0
    """Without those that were refused."""
    finished: set[str] = field(default_factory=set[str])
    """Request ids."""
    n_resumed: int = 0
    """Rollouts that went on elsewhere with the tokens that a lost worker had sampled."""
    n_dropped_groups: int = 0
    n_tokens: int = 0
    problems: list[str] = field(default_factory=list[str])
    """What the bus said about those that were lost."""

    @property
    def n_lost(self) -> int:
        """Rollouts that were asked for and never finished."""
        return self.n_requested - len(self.finished)

    def finish(self, rollout: Rollout) -> None:
        """Count an ending."""
        self.finished.add(rollout.rid)
        self.n_resumed += rollout.n_resumed > 0


class BusyClock:
    """Adds up the seconds during which at least one rollout was in progress."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._total_s = 0.0
        self._since: float | None = None

    def set_busy(self, *, is_busy: bool) -> None:
        """Note a change; saying the same again changes nothing."""
        if is_busy and self._since is None:
            self._since = self._clock()
        elif not is_busy and self._since is not None:
            self._total_s += self._clock() - self._since
            self._since = None

    def read_s(self) -> float:
        """Busy seconds until now."""
        return self._total_s + (0.0 if self._since is None else self._clock() - self._since)


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """How far and how wide to sample ahead."""

    groups_per_step: int
    group_size: int
    max_staleness: int


class RolloutFeed:
    """The stream of rollouts that training lives on. Start `run` as a task beside the trainer."""

    def __init__(self, client: RolloutClient, words: Iterator[str], options: FeedOptions) -> None:
        self.ledger = Ledger()
        self.busy = BusyClock()
        self._client = client
        self._words = words
        self._options = options
        self._room = asyncio.Semaphore((options.max_staleness + 1) * options.groups_per_step)
        self._finished: deque[Group] = deque()
        self._arrived = asyncio.Event()
        self._progressed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._numbers = count()
        self._in_progress: dict[int, str] = {}
        """Number -> worker, of rollouts of which a token has arrived, and that have not ended."""

    def n_mid_generation(self, worker: str) -> int:
        """Rollouts on `worker` that have sampled something and, as far as is seen, not ended."""
        return sum(each == worker for each in self._in_progress.values())

    async def progress(self) -> None:
        """Wait for the next tokens of any rollout."""
        self._progressed.clear()
        await self._progressed.wait()

    async def run(self) -> None:
        """Keep groups running until `stop`; return when the last one has ended."""
        async with asyncio.TaskGroup() as tasks:
            while await self._has_room():
                tasks.create_task(self._sample_group(next(self._words)))

    def stop(self) -> None:
        """Start no more groups; what runs goes on to its end."""
        self._stopping.set()
        self._room.release()  # wakes `run`, should it wait for room

    async def take(self, version: int) -> list[Group]:
        """Wait for the next step's groups, all within `max_staleness` of `version`."""
        taken: list[Group] = []
        while len(taken) < self._options.groups_per_step:
            while not self._finished:
                self._arrived.clear()
                await self._arrived.wait()
            group = self._finished.popleft()
            if version - group.token_versions.min() <= self._options.max_staleness:
                taken.append(group)
            else:
                self.ledger.n_dropped_groups += 1
                self._room.release()
        return taken

    def give_back(self, groups: list[Group]) -> None:
        """Make room for as many new groups: these are trained on and the update is published."""
        for _ in groups:
            self._room.release()

    async def _has_room(self) -> bool:
        await self._room.acquire()
        return not self._stopping.is_set()

    async def _sample_group(self, word: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            samples = [
                tasks.create_task(self._sample(word)) for _ in range(self._options.group_size)
            ]
        rollouts = [rollout for sample in samples if (rollout := sample.result()) is not None]
        if len(rollouts) == self._options.group_size:
            self._finished.append(Group(word, rollouts))
            self._arrived.set()
        else:
            await asyncio.sleep(RETRY_AFTER_S)
            self._room.release()

    async def _sample(self, word: str) -> Rollout | None:
        """One rollout, followed token by token; None when it was lost."""
        self.ledger.n_requested += 1
        number = next(self._numbers)
        rollout = None
        try:
            async for delta in self._client.stream(
                prompt_tokens(word), SAMPLING, deadline_s=DEADLINE_S, group=word
            ):
                self._note(number, delta)
                rollout = delta.rollout
        except Refused:
            self.ledger.n_requested -= 1  # nothing was started
        except BusError as problem:
            self.ledger.problems.append(str(problem))
        finally:
            self._in_progress.pop(number, None)
            self.busy.set_busy(is_busy=bool(self._in_progress))
        if rollout is not None:
            self.ledger.finish(rollout)
        return rollout

    def _note(self, number: int, delta: Delta) -> None:
        self._in_progress[number] = delta.worker
        self.ledger.n_tokens += len(delta.tokens)
        self.busy.set_busy(is_busy=True)
        self._progressed.set()
