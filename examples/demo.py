"""The demo: asynchronous RL over the bus on two cores, in about three minutes.

Two engine workers sample answers while the trainer learns from earlier ones. After each training
step the new weights go to the engines in place: rollouts under way just go on, and each of their
tokens remembers the version that sampled it. Half way, one worker is killed for good measure.
"""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from time import monotonic

import numpy as np
import torch

import rolloutbus
from rolloutbus import Fleet
from rolloutbus.errors import DeliveryError
from rolloutbus.events import Finished
from rolloutbus.examples.demo_report import DemoDirectory, DemoSummary, DemoView, stall_ms_p50
from rolloutbus.examples.grpo import Learner, LearnerOptions
from rolloutbus.examples.rollouts import SAMPLING, FeedOptions, RolloutFeed
from rolloutbus.examples.task import (
    as_text,
    best_constant_reward,
    draw_words,
    prompt_tokens,
    reward,
)
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model
from rolloutbus.examples.training import Training

MIN_MID_GENERATION = 4
"""The kill waits until the victim is in the middle of this many rollouts."""
SETTLE_S = 0.5
"""Time for the last messages of a frozen worker to arrive; far shorter than a lease."""


class KillDrill:
    """The kill of one worker: which, when, and in the middle of how many rollouts.

    What is seen here is late, so the victim is first frozen for a closer look: what a frozen
    worker has not finished it never will.
    """

    def __init__(
        self, fleet: Fleet, client: rolloutbus.RolloutClient, feed: RolloutFeed, view: DemoView
    ) -> None:
        self.victim = ""
        self.step = 0
        self.n_mid_generation = 0
        """Rollouts that the victim was in the middle of; 0 until it is dead."""
        self._fleet = fleet
        self._client = client
        self._feed = feed
        self._view = view

    async def run(self, step: int) -> None:
        """Wait for the right moment, then strike."""
        self.victim = self._fleet.worker_names[0]
        self.step = step
        while not self.n_mid_generation:
            await self._feed.progress()
            if self._is_worth_it():
                await self._freeze_and_kill()
        self._view.say(
            f"Killed worker {self.victim} (SIGKILL), on purpose, in the middle of "
            f"{self.n_mid_generation} rollouts. They go on elsewhere; a new one will join."
        )

    def _is_worth_it(self) -> bool:
        return self._feed.n_mid_generation(self.victim) >= MIN_MID_GENERATION

    async def _freeze_and_kill(self) -> None:
        pid = self._fleet.pids[self.victim]
        if not pid:
            return  # it is being started again
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(SETTLE_S)
            with suppress(DeliveryError):
                for _ in range(2):  # by its second answer a slow router has passed them on, too
                    await self._client.status()
            if self._is_worth_it():
                self.n_mid_generation = self._feed.n_mid_generation(self.victim)
                self._fleet.kill(self.victim)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


class Witness:
    """Start `run` as a task. Knows nothing of what the client asked for or got back."""

    def __init__(self, address: str, client: str, key_file: str = "") -> None:
        self._ended: dict[str, list[int]] = {}
        """Request id -> its tokens, as a worker first ended it."""
        self._subscriber = rolloutbus.subscribe(address, clients=[client], key_file=key_file)
        self.n_duplicated = 0
        """Endings with other tokens than the first one of the request."""

    @property
    def n_seen(self) -> int:
        """Requests that a worker has ended."""
        return len(self._ended)

    async def run(self) -> None:
        """Listen until cancelled."""
        async with self._subscriber:
            async for event in self._subscriber:
                match event:
                    case Finished(rid=rid, finish_reason="length" | "stop", n_missing=0):
                        tokens = event.tokens.tolist()
                        # A worker that is given all tokens ends the request and samples nothing.
                        self.n_duplicated += self._ended.setdefault(rid, tokens) != tokens
                    case _:
                        pass


HELD_OUT_WORDS = 100
STATUS_EVERY_S = 0.5
EVALUATION_DEADLINE_S = 120.0
RECORDER_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What can be chosen about a run."""

    seed: int = 0
    steps: int = 160
    workers: int = 2
    groups_per_step: int = 8
    group_size: int = 8
    max_staleness: int = 2
    """Updates that a token may be behind when it is trained on."""
    updates: bool = True
    """False: train but never publish, so that what the engines sample never gets better."""
    kill: bool = True
    """Kill a worker half way."""
    time_limit_s: float = 130.0
    """Training stops here, even before its last step."""
    quiet: bool = False
    runs: Path = Path("runs")
    record: str = ""
    """Directory for a journal of the whole run; empty: none."""


@dataclass(frozen=True, slots=True)
class DemoRun:
    """Everything that one run holds together."""

    options: DemoOptions
    client: rolloutbus.RolloutClient
    feed: RolloutFeed
    training: Training
    drill: KillDrill
    witness: Witness
    view: DemoView
    directory: DemoDirectory
    held_out: list[str]

    async def train(self) -> None:
        """All training steps, with rollouts running beside them and the kill half way."""
        async with asyncio.TaskGroup() as tasks:
            feed = tasks.create_task(self.feed.run())
            others = [
                tasks.create_task(self.witness.run()),
                tasks.create_task(self._watch_fleet()),
            ]
            for step in range(1, self.options.steps + 1):
                if self.options.kill and not self.drill.step and self._is_half_way(step):
                    self.drill.step = step
                    others.append(tasks.create_task(self.drill.run(step)))
                try:
                    patience_s = self.options.time_limit_s - self.training.elapsed_s
                    metrics = await self.training.step(patience_s=patience_s)
                except TimeoutError:
                    self.view.say(f"Time is up before step {step} of {self.options.steps}.")
                    break
                self.directory.append(metrics)
                self.view.show_step(metrics)
            self.feed.stop()
            await feed
            for other in others:
                other.cancel()

    def _is_half_way(self, step: int) -> bool:
        """Whether half of the steps are done, or half of the time is over."""
        is_late = self.training.elapsed_s >= self.options.time_limit_s / 2
        return is_late or step >= self.options.steps // 2

    async def evaluate(self) -> float:
        """Mean reward on the held-out words, under the newest weights."""
        answers = await self.client.generate_batch(
            [prompt_tokens(word) for word in self.held_out],
            SAMPLING,
            n=1,
            deadline_s=EVALUATION_DEADLINE_S,
            versions="latest",
        )
        word, answer = self.held_out[0], answers[0][0].tokens
        self.view.say(f"A word it never trained on: {word} -> {as_text(answer)}")
        rewards = [
            reward(word, rollout.tokens)
            for word, rollouts in zip(self.held_out, answers, strict=True)
            for rollout in rollouts
        ]
        return float(np.mean(rewards))

    async def _watch_fleet(self) -> None:
        while True:
            with suppress(DeliveryError):  # a view that is late must not end the run
                self.view.show_workers((await self.client.status()).workers)
            await asyncio.sleep(STATUS_EVERY_S)


async def run_demo(options: DemoOptions) -> DemoSummary:
    """Run the demo from nothing to its summary; leaves its files in `options.runs`."""
    began_at = monotonic()
    torch.set_num_threads(1)  # the engines need the other cores
    with DemoView(options.steps, quiet=options.quiet) as view:
        async with _started(options, view) as run:
            await run.train()
            reward_last = await run.evaluate()
        summary = _summarize(run, reward_last, monotonic() - began_at)
    run.directory.draw_rewards(run.training.steps, summary)
    view.show_summary(summary)
    return summary


@asynccontextmanager
async def _started(options: DemoOptions, view: DemoView) -> AsyncGenerator[DemoRun]:
    """Build the model and bring the fleet up."""
    directory = DemoDirectory(options.runs, options.seed)
    directory.write_config(asdict(options))
    model_path = directory.path / "model"
    build_tiny_model(model_path, options.seed)
    learner = Learner(load_tiny_model(model_path), LearnerOptions(steps=options.steps))
    rng = Random(options.seed)
    held_out = draw_words(rng, HELD_OUT_WORDS)
    view.say(f"Starting a router and {options.workers} workers …")
    async with (
        rolloutbus.up(
            model=str(model_path),
            workers=options.workers,
            engine="transformers",
            engine_options={"threads": 1, "slots": 6},
            tap=bool(options.record),
        ) as fleet,
        rolloutbus.connect(fleet.address, name="demo") as client,
        _recorded(fleet, options.record),
    ):
        feed_options = FeedOptions(
            options.groups_per_step, options.group_size, options.max_staleness
        )
        feed = RolloutFeed(client, _training_words(rng, held_out), feed_options)
        publisher = rolloutbus.WeightPublisher(client) if options.updates else None
        yield DemoRun(
            options=options,
            client=client,
            feed=feed,
            training=Training(feed, learner, publisher),
            drill=KillDrill(fleet, client, feed, view),
            witness=Witness(fleet.address, client.connection.settings.name),
            view=view,
            directory=directory,
            held_out=held_out,
        )


@asynccontextmanager
async def _recorded(fleet: rolloutbus.Fleet, directory: str) -> AsyncGenerator[None]:
    """Write down all that is said until the block is left; nothing without a directory."""
    if not directory:
        yield
        return
    async with rolloutbus.record(fleet.address, directory) as recorder:
        await recorder.caught_up(RECORDER_DEADLINE_S)
        yield
        await recorder.caught_up(RECORDER_DEADLINE_S)


def _training_words(rng: Random, held_out: list[str]) -> Iterator[str]:
    avoid = frozenset(held_out)
    while True:
        yield from draw_words(rng, 1, avoid)


def _summarize(run: DemoRun, reward_last: float, seconds: float) -> DemoSummary:
    steps, ledger = run.training.steps, run.feed.ledger
    train_s = sum(each.train_s for each in steps)
    n_trained_tokens = sum(each.n_tokens for each in steps)
    return DemoSummary(
        reward_first=float(np.mean([each.reward for each in steps[:10]])) if steps else 0.0,
        reward_last=reward_last,
        reward_constant=best_constant_reward(run.held_out),
        steps=len(steps),
        versions=run.training.version,
        rollouts_requested=ledger.n_requested,
        rollouts_finished=len(ledger.finished),
        lost=ledger.n_lost,
        witnessed=run.witness.n_seen,
        duplicated=run.witness.n_duplicated,
        resumed=ledger.n_resumed,
        dropped=ledger.n_dropped_groups,
        killed=run.drill.victim,
        killed_at_step=run.drill.step,
        killed_mid_generation=run.drill.n_mid_generation,
        max_staleness=max((each.staleness_max for each in steps), default=0),
        stale_token_share=_share(sum(each.n_stale_tokens for each in steps), n_trained_tokens),
        overlap=_share(sum(each.busy_s for each in steps), train_s),
        stall_ms_p50=stall_ms_p50(steps),
        tokens=ledger.n_tokens,
        seconds=seconds,
        run_directory=str(run.directory.path),
        not_shown=_not_shown(run),
    )


def _not_shown(run: DemoRun) -> list[str]:
    """What was asked for and did not happen, with the reason."""
    options, n_steps = run.options, len(run.training.steps)
    found: list[str] = []
    if n_steps < options.steps:
        found.append(f"steps {n_steps + 1} to {options.steps}: the time was up")
    if options.kill and not run.drill.step:
        found.append("the death of a worker: the run ended before its half")
    elif options.kill and not run.drill.n_mid_generation:
        found.append("the death of a worker: it was never in the middle of enough rollouts")
    elif options.kill and not run.feed.ledger.n_resumed:
        found.append("rollouts that go on elsewhere after the death of a worker: none was resumed")
    if options.updates and not run.training.version:
        found.append("updates of weights: none was published")
    return found


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
