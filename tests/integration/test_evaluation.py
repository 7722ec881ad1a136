"""An evaluation beside the training: each figure is of one version; the training never notices."""

# pyright: reportUnknownMemberType=false
# torch's stubs leave parameters untyped.

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import pytest_asyncio
import torch

from rolloutbus import Fleet, RolloutClient, SamplingParams, connect, subscribe
from rolloutbus.errors import StaleVersion
from rolloutbus.events import Finished
from rolloutbus.examples.evaluation import evaluate, watch
from rolloutbus.examples.imitation import HELD_OUT_WORDS
from rolloutbus.examples.imitation import evaluate as evaluate_here
from rolloutbus.examples.plain_grpo import GROUP_SIZE
from rolloutbus.examples.task import WORD_LETTERS, draw_words, prompt_tokens
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model
from rolloutbus.launcher.settings import UpOptions
from tests.integration.event_reader import EventReader
from tests.integration.live_fleet import status_when
from tests.integration.plain_runs import train_here, train_there

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

SLOTS = 8
FLEET: UpOptions = {"workers": 2, "engine_options": {"threads": 1, "slots": SLOTS}}
N_STEPS = 4
SAME = 1e-5
SEED = 1
WORDS = draw_words(Random(SEED), HELD_OUT_WORDS)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the fleet of this module runs."""
    path = tmp_path_factory.mktemp("evaluated")
    build_tiny_model(path, seed=3)
    return path


@pytest_asyncio.fixture(loop_scope="module")
async def trainer(fleet: Fleet) -> AsyncIterator[RolloutClient]:
    async with connect(fleet.address, name="trainer") as connected:
        yield connected


def answers_in(seen: EventReader) -> list[Finished]:
    """Whole words, in the order in which they ended."""
    return [each for each in seen.of(Finished) if len(each.tokens) == WORD_LETTERS]


async def test_rollouts_go_before_an_evaluation_that_waits(
    client: RolloutClient, trainer: RolloutClient
) -> None:
    prompts = [prompt_tokens(word) for word in WORDS[:4]]
    sampling = SamplingParams(max_new_tokens=WORD_LETTERS, ignore_eos=True)
    names = [each.connection.settings.name for each in (client, trainer)]
    events = subscribe(client.connection.settings.router, clients=names)
    async with EventReader(events) as seen, asyncio.TaskGroup() as tasks:
        for each in (client, trainer):
            await seen.hears_everyone(each)
        await client.pause()
        tasks.create_task(evaluate(client, WORDS, "latest"))
        await status_when(client, lambda status: status.n_queued == len(WORDS))
        tasks.create_task(trainer.generate_batch(prompts, sampling, n=GROUP_SIZE))
        n_all = len(WORDS) + len(prompts) * GROUP_SIZE
        await status_when(client, lambda status: status.n_queued == n_all)
        await client.resume()
        await seen.until(lambda: len(answers_in(seen)) == n_all)
    n_checked = 0
    for worker in ("w0", "w1"):
        ended = [each for each in answers_in(seen) if each.worker == worker]
        is_trainers = [each.rid.startswith("trainer/") for each in ended]
        n_trainers = sum(is_trainers)
        # What runs beside the trainer's last ones may end with them.
        assert not any(is_trainers[n_trainers + SLOTS :])
        n_checked += n_trainers
    # Who is back first after the pause may get all of the trainer's groups.
    assert n_checked == len(prompts) * GROUP_SIZE


async def test_a_run_that_is_evaluated_is_the_run_that_it_would_be(
    fleet: Fleet, client: RolloutClient, tiny_model: Path
) -> None:
    torch.set_num_threads(1)
    seen: dict[int, float] = {}

    async def follow() -> None:
        async for version, mean in watch(client, WORDS):
            seen.setdefault(version, mean)

    model = load_tiny_model(tiny_model)
    async with asyncio.TaskGroup() as tasks:
        beside = tasks.create_task(follow())
        found = await asyncio.to_thread(train_there, fleet.address, model, N_STEPS)
        seen[N_STEPS] = await evaluate(client, WORDS, f"exact:{N_STEPS}")
        beside.cancel()
    with pytest.raises(StaleVersion):
        await evaluate(client, WORDS, "exact:0")

    alone = load_tiny_model(tiny_model)
    at_first = evaluate_here(alone, SEED)
    np.testing.assert_allclose(found, train_here(alone, N_STEPS), rtol=0, atol=SAME)
    assert seen[N_STEPS] == pytest.approx(evaluate_here(alone, SEED), abs=0.01)
    assert seen.get(0, at_first) == pytest.approx(at_first, abs=0.01)
    assert seen[N_STEPS] > at_first
    assert list(seen) == sorted(seen)
