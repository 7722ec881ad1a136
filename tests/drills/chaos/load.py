"""One client of a chaos run: lanes that each keep one request open, and what they saw of it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import msgspec
import numpy as np

from rolloutbus.bus.actor.loop import Clock
from rolloutbus.bus.wire.errors import (
    ActorStopped,
    BusError,
    DeadlineExceeded,
    PeerLost,
    Refused,
    RequestExpired,
)
from rolloutbus.bus.wire.messages.generation import SamplingParams
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import Delta, OnLoss, Rollout, RolloutCancelled
from tests.drills.chaos.records import Ended, HistoryWriter, Invoked, Looked, Outcome, Progressed
from tests.drills.chaos.settings import LoadSettings

LATEST = "latest"
STREAMED_SHARE = 0.4
"""Of requests; recoveries are told from these, because their tokens can be watched."""
LATEST_SHARE = 0.2
"""Of requests; the others take any weights."""
ABORTED_SHARE = 0.05
"""Of streams."""
ON_LOSS: Sequence[OnLoss] = ("resume", "retry", "fail")
ON_LOSS_WEIGHTS = (90, 8, 2)
MAX_PROMPT_TOKENS = 24
MAX_TOKEN = 30_000


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as it was drawn."""

    op: str
    prompt: list[int]
    sampling: SamplingParams
    options: GenerateOptions
    is_streamed: bool
    abort_at: int
    """Tokens held at which it is aborted; 0: never."""

    def invoked(self, now: float) -> Invoked:
        """What the history says of it."""
        allowed: list[Outcome] = []
        if self.abort_at:
            allowed.append("cancelled")
        if self.options.get("on_loss") == "fail":
            # Lost with its worker, or stopped by a weight update that aborts: it may not go on.
            allowed += ("lost", "cancelled")
        return Invoked(
            op=self.op,
            at=now,
            prompt=_bytes(self.prompt),
            seed=self.sampling.sampling_seed or 0,
            n_tokens=self.sampling.max_new_tokens,
            allowed=allowed,
            is_streamed=self.is_streamed,
            wants_latest=self.options.get("versions") == LATEST,
            is_detached=self.options.get("detached", False),
        )


def draw_ask(op: str, settings: LoadSettings, rng: Random) -> Ask:
    """The next request of a lane."""
    if settings.prompts:
        prompt, seed = rng.choice(settings.prompts), 0
    else:
        prompt = [rng.randrange(MAX_TOKEN) for _ in range(rng.randint(1, MAX_PROMPT_TOKENS))]
        seed = rng.randrange(1 << 31)
    n_tokens = rng.randint(max(1, settings.max_tokens // 4), settings.max_tokens)
    temperature = 0.0 if settings.prompts else 1.0
    [on_loss] = rng.choices(ON_LOSS, ON_LOSS_WEIGHTS)
    if on_loss == "retry":
        n_tokens = max(1, settings.max_tokens // 4)  # it has to end between two losses
    is_streamed = rng.random() < STREAMED_SHARE
    is_aborted = is_streamed and rng.random() < ABORTED_SHARE
    versions = LATEST if rng.random() < LATEST_SHARE else "any"
    is_detached = rng.random() < settings.detached_share
    options = GenerateOptions(deadline_s=settings.deadline_s, on_loss=on_loss, versions=versions)
    if is_detached:
        options |= GenerateOptions(detached=True, group=op)
    return Ask(
        op,
        prompt,
        SamplingParams(
            max_new_tokens=n_tokens, temperature=temperature, ignore_eos=True, sampling_seed=seed
        ),
        options,
        is_streamed,
        rng.randint(1, n_tokens) if is_aborted else 0,
    )


class Lane:
    """Asks, waits for the answer, writes it down, asks again."""

    def __init__(
        self, client: RolloutClient, settings: LoadSettings, history: HistoryWriter, clock: Clock
    ) -> None:
        self._client = client
        self._settings = settings
        self._history = history
        self._clock = clock

    async def run(self, name: str, stop: asyncio.Event) -> None:
        """Until `stop` is set and the last answer is here."""
        rng = Random(f"{self._settings.seed}/{name}")
        number = 0
        while not stop.is_set():
            number += 1
            await self._ask(draw_ask(f"{name}:{number}", self._settings, rng))

    async def _ask(self, ask: Ask) -> None:
        self._history.add(ask.invoked(self._clock.now()))
        held = _Held()
        try:
            if ask.is_streamed:
                rollout = await self._stream(ask, held)
            else:
                rollout = await self._client.generate(ask.prompt, ask.sampling, **ask.options)
        except BusError as error:
            ended = _failure(ask, self._clock.now(), error)
        else:
            ended = _success(ask, self._clock.now(), rollout, held)
        self._history.add(ended)

    async def _stream(self, ask: Ask, held: "_Held") -> Rollout | None:
        rollout: Rollout | None = None
        async for delta in self._client.stream(ask.prompt, ask.sampling, **ask.options):
            before = len(held.tokens)
            held.add(delta)
            now, n_held = self._clock.now(), len(held.tokens)
            self._history.add(Progressed(ask.op, now, delta.worker, n_held))
            rollout = delta.rollout or rollout
            if rollout is None and before < ask.abort_at <= n_held:
                await self._client.abort([delta.rid])
        return rollout


async def collect(
    client: RolloutClient, name: str, settings: LoadSettings, history: HistoryWriter, clock: Clock
) -> None:
    """Take up what earlier processes of this client left; its `group` is the history's name."""
    deadline_s, own = settings.deadline_s, f"{name}:{settings.life}."
    listed = await client.reattach(deadline_s=deadline_s)
    found = [each for each in listed if not each.group.startswith(own)]
    history.add(Looked(name, clock.now(), len(found)))

    async def take_up(op: str, rid: str) -> None:
        ask = Ask(op, [], SamplingParams(), GenerateOptions(), is_streamed=False, abort_at=0)
        try:
            rollout = await client.collect(rid, deadline_s=deadline_s)
        except BusError as error:
            ended = _failure(ask, clock.now(), error)
        else:
            ended = _success(ask, clock.now(), rollout, _Held())
        history.add(msgspec.structs.replace(ended, is_collected=True))

    async with asyncio.TaskGroup() as group:
        for each in found:
            group.create_task(take_up(each.group, each.rid))


class _Held:
    """What the reader of a stream made of its deltas."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.n_gaps = 0

    def add(self, delta: Delta) -> None:
        self.n_gaps += delta.start > len(self.tokens)
        self.tokens[delta.start :] = delta.tokens.tolist()


def _success(ask: Ask, now: float, rollout: Rollout | None, held: _Held) -> Ended:
    if rollout is None:
        return Ended(ask.op, now, "failed", code="stream_without_result")
    streamed = _bytes(held.tokens) if ask.is_streamed else None
    return _with_rollout(Ended(ask.op, now, "ok", streamed=streamed, n_gaps=held.n_gaps), rollout)


def _failure(ask: Ask, now: float, error: BusError) -> Ended:
    code = str(getattr(error, "code", type(error).__name__))
    match error:
        case RolloutCancelled():
            return _with_rollout(Ended(ask.op, now, "cancelled"), error.partial)
        case Refused() | ActorStopped():
            outcome: Outcome = "refused"
        case RequestExpired() | DeadlineExceeded():
            outcome = "expired"
        case PeerLost():
            outcome = "lost"
        case _:
            outcome = "failed"
    return Ended(ask.op, now, outcome, rid=str(getattr(error, "rid", "")), code=code)


def _with_rollout(ended: Ended, rollout: Rollout) -> Ended:
    return Ended(
        op=ended.op,
        at=ended.at,
        outcome=ended.outcome,
        rid=rollout.rid,
        tokens=rollout.tokens.astype("<i4").tobytes(),
        versions=list(rollout.version_runs),
        worker=rollout.worker,
        n_attempts=rollout.n_attempts,
        streamed=ended.streamed,
        n_gaps=ended.n_gaps,
    )


def _bytes(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()
