"""Asynchronous RL under a staleness bound: groups are sampled while the trainer trains others.

The trainer takes a batch of finished groups, trains, and publishes the next version; requests go on
over it. A group is as old as the version that it began with. Trained at version v, it may have
begun at v - staleness at the earliest: never older, under any policy.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from benchmarks.coordination.engines import SHAPES, Job, SimEngine, VirtualTime
from benchmarks.coordination.fleets import WAYS
from rolloutbus.examples.relieve import Pace, Rule, SlowWatch

GROUP = 16
WARM_UP_STEPS = 4
PUBLISH_S = 2.0
"""From the end of a training step until engines sample with its weights."""
WATCH_S = 2.0
"""Between two looks of the mover."""
MIN_GAIN_S = 2.0
"""A request moves if it is expected to end so much earlier."""
MOVES_AT_ONCE = 4
"""To one engine, between two looks."""
MOVES_OF_ONE = 2
"""At most, of one request."""
POOL_TOKENS = 6000
"""A request with so many tokens goes to the pool of engines for long ones, if there is one."""
POOL_REQUESTS = 24
"""At most, at each engine of the pool."""


@dataclass(frozen=True)
class RlLoad:
    """What is trained on what."""

    n_engines: int
    n_batch: int
    """Groups of a batch."""
    staleness: int
    n_steps: int = 12
    """Of the trainer; the first WARM_UP_STEPS are not measured."""
    model: str = "7b"
    prompt_tokens: int = 400
    """Median; lognormal."""
    new_tokens: int = 2000
    """Median; lognormal."""
    sigma: float = 1.0
    max_new: int = 24_000
    trainer_tokens_per_s: float = 10_000
    """For each engine of the fleet."""
    slow_share: float = 0.0
    """Of engines that become `slowness` times slower when the warm-up ends."""
    slowness: float = 3.0
    late_share: float = 0.0
    """Of engines that join when the warm-up ends."""


@dataclass(frozen=True)
class RlPolicy:
    """How requests are placed and admitted, and what happens to those that lag behind."""

    way: str = "bus"
    late: Literal["wait", "drop"] = "wait"
    """The trainer waits while a step would make others too old, or those are dropped."""
    n_extra: int = 0
    """Samples of a group beyond 16: the last ones are aborted when 16 are there."""
    moves: bool = False
    """Requests that hold the trainer up move to engines where they end earlier."""
    pool_share: float = 0.0
    """Of engines that get nothing but requests that have become long."""
    relieves: bool = False
    """Engines that are much slower than the others leave at once."""


@dataclass(eq=False)
class _Group:
    version: int
    jobs: list[Job]
    ended: list[Job] = field(default_factory=list[Job])

    @property
    def n_tokens(self) -> int:
        """To be trained on."""
        return sum(job.n_prompt + job.n_new for job in self.ended)


class RlRun:
    """One run of a load under a policy."""

    def __init__(self, load: RlLoad, policy: RlPolicy, seed: int) -> None:
        self._load, self._policy = load, policy
        self._chance = Random(seed)
        self._time = VirtualTime()
        shape = SHAPES[load.model]
        n_late = round(load.late_share * load.n_engines)
        self._fleet = WAYS[policy.way](self._time, shape, load.n_engines - n_late, seed)
        self._pool = self._fleet.engines[: round(policy.pool_share * load.n_engines)]
        for engine in self._pool:
            self._fleet.block(engine)
        self._version = 0
        self._open: list[_Group] = []
        """Begun, not finished."""
        self._finished: list[_Group] = []
        self._n_training = 0
        self._is_training = False
        self._n_groups = 0
        self._n_dropped = 0
        self._n_moved = 0
        self._moved: dict[Job, int] = {}
        self._slow = SlowWatch(Rule())
        self._n_steps: dict[str, float] = {}
        """Engine -> steps until the last look."""
        self._trained: list[_Group] = []
        self._oldest = 0
        self._waited_s = 0.0
        self._idle_since = 0.0
        self._measured_from = 0.0

    def run(self) -> dict[str, float]:
        """From an empty fleet; what happens after the warm-up counts."""
        self._admit()
        self._time.at(WATCH_S, self._watch)
        self._time.run(lambda: self._version >= self._load.n_steps)
        begun_at = self._measured_from
        hours = (self._time.now - begun_at) / 3600
        tokens = [job.n_new for group in self._trained for job in group.ended]
        mean = self._load.new_tokens * math.exp(self._load.sigma**2 / 2)
        return {
            "trained_tokens_per_h": round(sum(tokens) / hours / 1e6, 2),
            "trained_groups_per_h": round(len(self._trained) / hours),
            "step_s": round(hours * 3600 / (self._load.n_steps - WARM_UP_STEPS), 1),
            "trainer_waits": round(self._waited_s / hours / 3600, 3),
            "mean_length": round(sum(tokens) / len(tokens) / mean, 3),
            "n_dropped": self._n_dropped,
            "n_moved": self._n_moved,
            "oldest": self._oldest,
        }

    def _lognormal(self, median: float, sigma: float, most: float) -> int:
        return max(1, round(min(most, median * math.exp(self._chance.gauss(0.0, sigma)))))

    def _admit(self) -> None:
        load, policy = self._load, self._policy
        most = (load.staleness + 1) * load.n_batch  # more could not be trained in time
        jobs: list[Job] = []
        while len(self._open) + len(self._finished) + self._n_training < most:
            self._n_groups += 1
            group = _Group(self._version, [])
            name = f"g{self._n_groups}"
            path = ((name, self._lognormal(load.prompt_tokens, 0.6, 4000)),)
            # Lengths of the answers to one prompt are alike.
            median = self._lognormal(load.new_tokens, 0.7 * load.sigma, load.max_new)
            spread = math.sqrt(1 - 0.7**2) * load.sigma
            for _ in range(GROUP + policy.n_extra):
                n_new = self._lognormal(median, spread, load.max_new)
                group.jobs.append(Job(path, n_new, self._ender(group), group=name))
            self._open.append(group)
            jobs += group.jobs
        if jobs:
            self._fleet.submit(jobs)

    def _ender(self, group: _Group) -> Callable[[Job], None]:
        return lambda job: self._ended(group, job)

    def _ended(self, group: _Group, job: Job) -> None:
        self._moved.pop(job, None)
        if len(group.ended) == GROUP:
            return
        group.ended.append(job)
        group.jobs.remove(job)
        if len(group.ended) == GROUP:
            self._stop(group)
            self._open.remove(group)
            self._finished.append(group)
            self._train()

    def _stop(self, group: _Group) -> None:
        for job in group.jobs:
            self._fleet.abort(job)
            self._moved.pop(job, None)
        group.jobs.clear()

    def _train(self) -> None:
        """Begin the next step if there is a batch that breaks no bound."""
        load = self._load
        if self._is_training or len(self._finished) < load.n_batch:
            return
        if self._policy.late == "wait":
            self._finished.sort(key=lambda group: group.version)
            if not self._is_safe([*self._open, *self._finished[load.n_batch :]]):
                return
        batch, self._finished = self._finished[: load.n_batch], self._finished[load.n_batch :]
        self._oldest = max(self._oldest, *(self._version - group.version for group in batch))
        self._waited_s += self._time.now - self._idle_since
        self._is_training, self._n_training = True, len(batch)
        rate = load.trainer_tokens_per_s * load.n_engines
        took_s = sum(group.n_tokens for group in batch) / rate + PUBLISH_S
        if self._version >= WARM_UP_STEPS:
            self._trained += batch
        self._time.at(self._time.now + took_s, self._trained_one)

    def _is_safe(self, left: list[_Group]) -> bool:
        """Whether each of these can still be trained in time after the step that begins now."""
        load = self._load
        n_of = Counter(group.version for group in left)
        n_due = 0
        for version in sorted(n_of):
            n_due += n_of[version]
            if n_due > (version + load.staleness - self._version) * load.n_batch:
                return False
        return True

    def _trained_one(self) -> None:
        self._version += 1
        self._is_training, self._n_training = False, 0
        self._idle_since = self._time.now
        if self._version == WARM_UP_STEPS:
            self._warmed_up()
        self._drop_the_old()
        self._admit()
        self._train()

    def _warmed_up(self) -> None:
        load = self._load
        self._measured_from = self._time.now
        self._waited_s = 0.0
        self._n_dropped = self._n_moved = 0
        engines = list(self._fleet.engines)
        for engine in engines[len(engines) - round(load.slow_share * load.n_engines) :]:
            engine.slow_down(load.slowness)
        for _ in range(load.n_engines - len(engines)):
            self._fleet.join(SHAPES[load.model])

    def _drop_the_old(self) -> None:
        oldest = self._version - self._load.staleness
        for group in [each for each in self._open if each.version < oldest]:
            assert self._policy.late == "drop"
            self._stop(group)
            self._open.remove(group)
            self._n_dropped += 1
        fresh = [each for each in self._finished if each.version >= oldest]
        self._n_dropped += len(self._finished) - len(fresh)
        self._finished = fresh

    def _watch(self) -> None:
        self._time.at(self._time.now + WATCH_S, self._watch)
        if self._policy.moves:
            self._move_the_urgent()
        if self._pool:
            self._move_the_long()
        if self._policy.relieves:
            self._relieve_the_slow()

    def _move_the_long(self) -> None:
        """Requests that have become long go to the pool, the longest first."""
        jobs = [
            (each.engine.sampled(each), n, each)
            for n, each in enumerate(job for group in self._open for job in group.jobs)
            if each.engine is not None and each not in self._moved
        ]
        for n_tokens, _, job in sorted(jobs, reverse=True):
            target = min(self._pool, key=lambda each: each.load)
            if n_tokens < POOL_TOKENS or target.load >= POOL_REQUESTS:
                break
            self._move(job, target)

    def _relieve_the_slow(self) -> None:
        """As `examples/relieve.py` has them leave: what a slow engine runs goes on elsewhere."""
        engines = {each.name: each for each in self._fleet.serving}
        paces = [
            Pace(name, (each.n_steps - self._n_steps.get(name, 0.0)) / WATCH_S, len(each.running))
            for name, each in engines.items()
        ]
        self._n_steps = {name: each.n_steps for name, each in engines.items()}
        for name in self._slow.look(paces):
            engine = engines[name]
            self._fleet.block(engine)
            for job in [*engine.running, *engine.waiting]:
                self._move(job, min(self._fleet.serving, key=lambda each: each.load))

    def _move(self, job: Job, target: SimEngine) -> None:
        self._fleet.move(job, target)
        self._moved[job] = self._moved.get(job, 0) + 1
        self._n_moved += 1

    def _move_the_urgent(self) -> None:
        """Requests of the groups that the trainer needs first go where they end earlier."""
        room = dict.fromkeys(self._fleet.serving, MOVES_AT_ONCE)
        fastest = min(room, key=lambda each: each.step_s())
        for group in sorted(self._open, key=lambda each: (each.version, len(each.jobs))):
            if group.version + self._load.staleness > self._version + 1:
                return
            for job in list(group.jobs):
                if self._moved.get(job, 0) < MOVES_OF_ONE and self._gain_s(job, fastest) > 0:
                    self._move(job, fastest)
                    room[fastest] -= 1
                    if not room[fastest]:
                        del room[fastest]
                    if not room:
                        return
                    fastest = min(room, key=lambda each: each.step_s())

    def _gain_s(self, job: Job, target: SimEngine) -> float:
        """Seconds by which the request ends earlier at another engine, less the least worth it."""
        source = job.engine
        if source is None or source is target:
            return -math.inf
        n_left = source.sampled(job)  # of a long-tailed length: about what has been seen of it
        n_context = job.n_prompt + n_left
        pause_s = n_context * target.shape.per_prompt_token_s * target.slowness
        faster_s = n_left * (source.step_s() - target.step_s(1, n_context))
        return faster_s - pause_s - MIN_GAIN_S
