"""A simulated engine in virtual time: continuous batching, KV memory, and a prefix cache.

A step takes a base time (reading the weights), a time for each request in the batch, and one for
each token of context (reading their KV). Prompts are computed first, and decoding waits meanwhile.
Nothing is done per step: an engine says when its next request ends, and the time to get there.
"""

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

KV_HEADROOM = 0.97
"""Part of the KV memory up to which requests are admitted; the rest is for those that grow."""


@dataclass(frozen=True)
class EngineShape:
    """What a model on one GPU takes: seconds, and tokens of KV memory."""

    base_s: float
    per_request_s: float
    per_context_token_s: float
    per_prompt_token_s: float
    kv_tokens: int
    max_running: int


SHAPES = {
    # Of one request 1.21 ms a token, of 256 requests of 128 + 512 tokens 92,000-94,000 tokens/s
    # (H200, SGLang 0.5.17). KV: 12 kB a token at 4 TB/s. Beyond 256 requests it is too fast.
    "0.5b": EngineShape(1.2e-3, 4.0e-6, 3.0e-9, 2.4e-6, 7_000_000, 256),
    # 256 requests of 128 + 384 tokens, 21,109 tokens/s (H200, SGLang 0.5.17). What that does not
    # tell apart: 15.2 GB of weights and 57 kB of KV a token at 85 % of 4.8 TB/s, and prompts at
    # 60 % of 790 TFLOP/s. The rest is what a request takes.
    "7b": EngineShape(3.7e-3, 17.5e-6, 14e-9, 32e-6, 1_600_000, 256),
}


class VirtualTime:
    """A clock, and what is to be done at which time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do this then; what is due at once is done in the order in which it was asked for."""
        heapq.heappush(self._due, (max(time_s, self.now), next(self._numbers), action))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Until it is over; raises RuntimeError if nothing is left to do before that."""
        while not is_over():
            if not self._due:
                raise RuntimeError("nothing is left to do, and the run is not over")
            self.now, _, action = heapq.heappop(self._due)
            action()


@dataclass(eq=False, slots=True)
class Job:
    """One request: what an engine is to compute, and what a balancer may know of it."""

    path: tuple[tuple[str, int], ...]
    """The prompt: names of its beginnings and the tokens up to the end of each, shortest first."""
    n_new: int
    """Tokens that it will sample; no balancer knows it."""
    on_end: Callable[["Job"], None]
    session: str = ""
    group: str = ""
    n_allowed: int = 1 << 15
    """Tokens that it may sample; clients know that, and not how many it will."""
    own: str = ""
    """Name of the whole dialogue, under which its tokens stay in the cache; empty: they do not."""
    done: int = 0
    """Tokens sampled before the present stay at an engine."""
    ends_at_step: float = 0.0
    began_at_step: float = 0.0
    n_cached: int = 0
    held: int = 0
    """Tokens of KV memory that are its alone, when it began."""
    engine: "SimEngine | None" = None
    """Where it waits or runs."""

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return self.path[-1][1]


class PrefixCache:
    """Beginnings of prompts in KV memory that no running request holds alone.

    The least recently used go first, shared ones that are in use among them: they are small.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Name -> (tokens from, to)."""
        self.n_tokens = 0
        self.added: list[tuple[str, int, int]] = []
        self.removed: list[tuple[str, int, int]] = []

    def match(self, job: Job) -> int:
        """Tokens of the prompt that need not be computed. All beginnings must be there."""
        matched = 0
        for name, end in job.path:
            found = self._held.get(name)
            if found is None or found[0] > matched:
                break
            self._held.move_to_end(name)
            matched = min(found[1], end)
        return min(matched, job.n_prompt - 1)

    def put(self, name: str, start: int, end: int) -> None:
        """These tokens are in the cache from now on."""
        _, before = self._held.get(name, (start, start))
        if end > before:
            self.n_tokens += end - before
            self._held[name] = (start, end)
            self.added.append((name, before, end))
        self._held.move_to_end(name)

    def take(self, name: str) -> None:
        """A running request holds these tokens now, and they stay readable for it."""
        start, end = self._held.pop(name, (0, 0))
        self.n_tokens -= end - start

    def shrink(self, n_tokens: int) -> None:
        """Keep at most so many."""
        while self.n_tokens > n_tokens and self._held:
            name, (start, end) = self._held.popitem(last=False)
            self.n_tokens -= end - start
            self.removed.append((name, start, end))


@dataclass(eq=False)
class SimEngine:
    """One engine with its own queue."""

    name: str
    shape: EngineShape
    time: VirtualTime
    on_end: Callable[[Job], None]
    on_cache_news: Callable[["SimEngine"], None] | None = None
    """Called when its cache has changed; not to be answered at once."""
    slowness: float = 1.0
    """Factor of all its times."""
    running: dict[Job, None] = field(default_factory=dict[Job, None])
    waiting: OrderedDict[Job, None] = field(default_factory=OrderedDict[Job, None])
    cache: PrefixCache = field(default_factory=PrefixCache)
    n_sampled: float = 0.0
    n_prompt: int = 0
    n_cached: int = 0
    _step: float = 0.0
    _context: float = 0.0
    """Tokens of context of all that run."""
    _kv: float = 0.0
    """Tokens of KV memory that they hold."""
    _at: float = 0.0
    _busy_until: float = 0.0
    """Prompts are computed until then."""
    _ends: list[tuple[float, int, Job]] = field(default_factory=list[tuple[float, int, Job]])
    _n: int = 0
    _plan: int = 0

    @property
    def load(self) -> int:
        """Requests that run or wait here."""
        return len(self.running) + len(self.waiting)

    @property
    def n_steps(self) -> float:
        """Steps so far."""
        self._advance()
        return self._step

    def step_s(self, n_more: int = 0, context_more: float = 0.0) -> float:
        """How long a step takes now, or with so much more."""
        shape, n = self.shape, len(self.running) + n_more
        context = self._context + context_more
        busy = shape.base_s + n * shape.per_request_s + context * shape.per_context_token_s
        return busy * self.slowness

    def add(self, job: Job) -> None:
        """One more request; its prompt and what it sampled elsewhere are computed here."""
        job.engine = self
        self.waiting[job] = None
        self._replan()

    def remove(self, job: Job) -> None:
        """Stop a request; `job.done` then tells what it has sampled."""
        self._advance()
        if job in self.waiting:
            del self.waiting[job]
        elif job in self.running:
            self._leave(job)
        job.engine = None
        self._replan()

    def sampled(self, job: Job) -> float:
        """Tokens that a request has now."""
        self._advance()
        began = job.began_at_step if job in self.running else self._step
        return job.done + self._step - began

    def slow_down(self, factor: float) -> None:
        """From now on everything takes this many times longer."""
        self._advance()
        self.slowness = factor
        self._replan()

    def _advance(self) -> None:
        """Decode up to now: steps grow longer as the context does, so it is a quadratic."""
        now = self.time.now
        begun_at = max(self._at, min(self._busy_until, now))
        self._at = now
        n = len(self.running)
        if not n or now <= begun_at:
            return
        growth = n * self.shape.per_context_token_s * self.slowness / 2
        first = self.step_s()
        n_steps = (math.sqrt(first * first + 4 * growth * (now - begun_at)) - first) / (2 * growth)
        self._step += n_steps
        self._context += n * n_steps
        self._kv += n * n_steps
        self.n_sampled += n * n_steps

    def _replan(self) -> None:
        """Admit what fits, and be back when the next request ends or memory is full."""
        self._advance()
        self._admit()
        self.cache.shrink(int(self.shape.kv_tokens - self._kv))
        if self.on_cache_news is None:
            self.cache.added.clear()
            self.cache.removed.clear()
        elif self.cache.added or self.cache.removed:
            self.on_cache_news(self)
        self._plan += 1
        while self._ends and not self._is_current(self._ends[0]):
            heapq.heappop(self._ends)
        if not self._ends:
            return
        n = len(self.running)
        n_steps = self._ends[0][0] - self._step
        room = (self.shape.kv_tokens - self._kv) / n
        n_steps = max(0.0, min(n_steps, room + 1.0))
        growth = n * self.shape.per_context_token_s * self.slowness / 2
        took_s = n_steps * self.step_s() + growth * n_steps * n_steps
        plan = self._plan
        begins_at = max(self.time.now, self._busy_until)
        self.time.at(begins_at + took_s, lambda: self._wake(plan))

    def _wake(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        ended: list[Job] = []
        while self._ends and self._ends[0][0] <= self._step + 1e-6:
            end = heapq.heappop(self._ends)
            if self._is_current(end):
                self._leave(end[2])
                ended.append(end[2])
        self._retract()
        self._replan()
        for job in ended:
            if job.engine is self:  # it may have been stopped because of the one before it
                self.on_end(job)

    def _is_current(self, end: tuple[float, int, Job]) -> bool:
        """Whether the request is here, and has not been stopped in between."""
        return end[2] in self.running and end[2].ends_at_step == end[0]

    def _retract(self) -> None:
        """Memory is full: the youngest requests wait again, as SGLang has them do."""
        while self._kv > self.shape.kv_tokens and len(self.running) > 1:
            youngest = max(self.running, key=lambda job: job.began_at_step)
            self._leave(youngest)
            self.waiting[youngest] = None
            self.waiting.move_to_end(youngest, last=False)

    def _leave(self, job: Job) -> None:
        n_here = self._step - job.began_at_step
        del self.running[job]
        context = job.n_prompt + job.done + n_here
        self._context -= context
        self._kv -= job.held + n_here
        job.done = min(job.n_new, round(job.done + n_here))
        if not self.running:
            self._context = self._kv = 0.0
        if job.own:
            shared = job.path[-2][1] if len(job.path) > 1 else 0
            self.cache.put(job.own, shared, job.n_prompt + job.done)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.shape.max_running:
            job = next(iter(self.waiting))
            n_tokens = job.n_prompt + job.done
            if self._kv + n_tokens > KV_HEADROOM * self.shape.kv_tokens and self.running:
                return
            del self.waiting[job]
            self._begin(job)

    def _begin(self, job: Job) -> None:
        matched = self.cache.match(job)
        n_tokens = job.n_prompt + job.done
        shared = 0
        for name, end in job.path:
            if name != job.own:
                self.cache.put(name, shared, end)
                shared = end
        if job.own:
            self.cache.take(job.own)
        took_s = (n_tokens - matched) * self.shape.per_prompt_token_s * self.slowness
        self._busy_until = max(self._busy_until, self.time.now) + took_s
        self.n_prompt += n_tokens
        self.n_cached += matched
        job.n_cached = matched
        job.held = n_tokens - shared
        job.began_at_step = self._step
        job.ends_at_step = self._step + job.n_new - job.done
        self.running[job] = None
        self._context += n_tokens
        self._kv += job.held
        self._n += 1
        heapq.heappush(self._ends, (job.ends_at_step, self._n, job))
