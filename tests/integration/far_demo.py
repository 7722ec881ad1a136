"""The demo's trainer on a fleet of several hosts: it samples, learns and publishes until stopped.

`python -m tests.integration.far_demo ROUTERS KEY_FILE MODEL` reads what to do, line by line, and
prints lines of JSON. `begin`, when there are workers: one with its `streams`, then one for each
training `step`. `busy WORKER`: one as soon as that worker is in the middle of some rollouts.
`moved`: one when another router than before answers and a rollout has ended there. An empty line
ends it: one with what was `requested` and what came of it. `sent_bytes` are those that its host has
sent so far; `_at` are times of the machine's monotonic clock.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import torch

import rolloutbus
from rolloutbus import RolloutClient, SamplingParams
from rolloutbus.errors import BusError
from rolloutbus.examples.demo import Witness
from rolloutbus.examples.grpo import Learner, LearnerOptions
from rolloutbus.examples.rollouts import FeedOptions, RolloutFeed
from rolloutbus.examples.task import draw_words, prompt_tokens
from rolloutbus.examples.tiny_model import load_tiny_model
from rolloutbus.examples.training import Training

GROUPS = FeedOptions(groups_per_step=8, group_size=8, max_staleness=2)
"""As in the demo."""
LONG = SamplingParams(max_new_tokens=96, ignore_eos=True)
MIN_MID_GENERATION = 4
DEADLINE_S = 60.0
QUIET_S = 2.0
"""A witness that has heard no ending for so long has heard the last one."""


def say(**report: object) -> None:
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


def sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def words(rng: Random) -> Iterator[str]:
    while True:
        yield from draw_words(rng, 1)


async def watch_stream(client: RolloutClient, worker: str) -> dict[str, float]:
    """Follow one long rollout while it is sampled."""
    arrived_at, tokens = list[float](), list[int]()
    rollout = None
    prompt = prompt_tokens(draw_words(Random(worker), 1)[0])
    async for delta in client.stream(prompt, LONG, worker=worker, deadline_s=DEADLINE_S):
        tokens += delta.tokens.tolist()
        rollout = delta.rollout
        if len(delta.tokens):
            arrived_at.append(time.monotonic())
    assert rollout is not None
    assert rollout.tokens.tolist() == tokens
    return {
        "tokens": len(tokens),
        "deltas": len(arrived_at),
        "spread_s": round(arrived_at[-1] - arrived_at[0], 3),
        "longest_gap_s": round(float(np.diff(arrived_at).max(initial=0.0)), 3),
    }


async def train(training: Training) -> None:
    """Step after step; `workers` are those that serve the version it has published."""
    while True:
        metrics = await training.step(patience_s=DEADLINE_S)
        say(
            step=metrics.step,
            sent_bytes=sent_bytes(),
            publish_s=round(metrics.publish_s, 2),
            workers=sorted(metrics.stall_ms),
        )


async def wait_until_busy(feed: RolloutFeed, worker: str) -> None:
    while (n := feed.n_mid_generation(worker)) < MIN_MID_GENERATION:
        await feed.progress()
    say(mid_generation=n)


async def wait_until_moved(client: RolloutClient, feed: RolloutFeed, instance: str) -> str:
    """Until another router than this one serves; returns which."""
    status = None
    while status is None or status.instance == instance:
        with suppress(BusError):  # the router is away
            status = await client.status(deadline_s=1.0)
    status_at, n_finished = time.monotonic(), len(feed.ledger.finished)
    while len(feed.ledger.finished) == n_finished:
        await feed.progress()
    say(status_at=status_at, rollout_at=time.monotonic())
    return status.instance


async def settle(witness: Witness, n_requested: int) -> None:
    """Until the witness has heard the last ending; it may miss some while a host is cut off."""
    n_seen, quiet_since = -1, 0.0
    while witness.n_seen < n_requested:
        if witness.n_seen > n_seen:
            n_seen, quiet_since = witness.n_seen, time.monotonic()
        elif time.monotonic() - quiet_since > QUIET_S:
            return
        await asyncio.sleep(0.1)  # it tells nobody


async def main(address: str, key_file: str, model: str) -> None:
    torch.set_num_threads(1)
    assert sys.stdin.readline() == "begin\n"
    learner = Learner(load_tiny_model(Path(model)), LearnerOptions(steps=100))
    model_bytes = sum(each.nbytes for each in learner.model.parameters())
    async with rolloutbus.connect(address, key_file=key_file) as client:
        status = await client.status()
        instance = status.instance
        streams = {each.name: await watch_stream(client, each.name) for each in status.workers}
        feed = RolloutFeed(client, words(Random(0)), GROUPS)
        witness = Witness(address, client.connection.settings.name, key_file)
        training = Training(feed, learner, rolloutbus.WeightPublisher(client))
        say(streams=streams, model_bytes=model_bytes, sent_bytes=sent_bytes())
        async with asyncio.TaskGroup() as tasks:
            sampling = tasks.create_task(feed.run())
            others = [tasks.create_task(witness.run()), tasks.create_task(train(training))]
            while asked := (await asyncio.to_thread(sys.stdin.readline)).split():
                match asked:
                    case ["busy", worker]:
                        await wait_until_busy(feed, worker)
                    case ["moved"]:
                        instance = await wait_until_moved(client, feed, instance)
                    case _:
                        raise ValueError(asked)
            feed.stop()
            await sampling
            await settle(witness, feed.ledger.n_requested)
            for each in others:
                each.cancel()
    say(
        requested=feed.ledger.n_requested,
        finished=len(feed.ledger.finished),
        lost=feed.ledger.n_lost,
        problems=feed.ledger.problems,
        resumed=feed.ledger.n_resumed,
        witnessed=witness.n_seen,
        duplicated=witness.n_duplicated,
    )


asyncio.run(main(*sys.argv[1:]))
