"""Too little memory: requests take turns by priority, none is wrong, and a death is explained."""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus import Fleet, RolloutClient, SamplingParams
from rolloutbus.bus.wire.messages.control import Load
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.live_fleet import PACE_S, Streamed
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import fleet_of
from tests.sglang.memory_hook import EXHAUSTING_TOKEN
from tests.sglang.reference import SameWeights

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOM = 1024
"""Tokens that the KV cache holds."""
TOLERANCE = 1e-4
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
RESTART_S = 400.0
PRIORITIES = [0, 20, -20, 40]
"""In the order in which they come."""


class Hook(NamedTuple):
    """Files that tell the hook in the engine what to do."""

    once: Path
    slow: Path

    def wants_too_much(self) -> None:
        """The next step with the token `EXHAUSTING_TOKEN` does."""
        self.once.touch()

    @contextmanager
    def slowly(self) -> Generator[None]:
        """The engine takes its time meanwhile."""
        self.slow.touch()
        yield
        self.slow.unlink()


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Hook:
    """At first it does nothing."""
    folder = tmp_path_factory.mktemp("hook")
    return Hook(folder / "once", folder / "slow")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(llama: Path, hook: Hook) -> AsyncIterator[Fleet]:
    hooked = {
        "name": "memory",
        "target_modules": ["model.embed_tokens"],
        "hook_factory": "tests.sglang.memory_hook:hook_of",
        "config": {name: str(path) for name, path in hook._asdict().items()},
    }
    options = fleet_of(
        llama, max_total_tokens=ROOM, enable_priority_scheduling=True, forward_hooks=[hooked]
    )
    async with rolloutbus.up(**options) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[RolloutClient]:
    settings = ClientSettings(name="pressure", router=fleet.address, overtime_s=DEADLINE_S)
    async with RolloutClient(settings) as connected:
        yield connected


def log_of(fleet: Fleet) -> str:
    """Everything that its processes wrote so far."""
    files = sorted((fleet.run_dir / "logs").glob("*.log"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


async def load_when(
    client: RolloutClient, is_so: Callable[[Mapping[str, float]], bool]
) -> Mapping[str, float]:
    """The first gauges of which `is_so` holds."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            gauges = (await client.get_load(deadline_s=DEADLINE_S)).only(Load).gauges
            if is_so(gauges):
                return gauges
            await asyncio.sleep(PACE_S)  # an engine tells nobody when it changes


@pytest.mark.shows("KV cache pressure")
async def test_requests_that_do_not_fit_together_are_right_all_the_same(
    client: RolloutClient, llama: Path
) -> None:
    reference = SameWeights(llama)
    long = msgspec.structs.replace(GREEDY, max_new_tokens=ROOM // 3)
    punished = msgspec.structs.replace(long, repetition_penalty=1.3, frequency_penalty=0.2)
    prompts = [[3 + row, 10, 20 + row, 7] for row in range(8)]

    plain, other = [
        await asyncio.gather(
            *(client.generate(prompt, sampling, deadline_s=DEADLINE_S) for prompt in prompts)
        )
        for sampling in (long, punished)
    ]

    for prompt, rollout in zip(prompts, plain, strict=True):
        assert rollout.tokens.tolist() == reference.likeliest(prompt, rollout)
        truth = reference.fresh(prompt, rollout, 1.0)
        assert np.abs(truth - rollout.logprobs).max() < TOLERANCE
    alone = await client.generate(prompts[-1], punished, deadline_s=DEADLINE_S)
    assert other[-1].tokens.tolist() == alone.tokens.tolist()


@pytest.mark.shows("priority", "forward_hooks")
async def test_of_requests_that_wait_in_the_engine_the_urgent_one_goes_first(
    client: RolloutClient, hook: Hook
) -> None:
    # It leaves no room for another one until it ends.
    room = msgspec.structs.replace(GREEDY, max_new_tokens=ROOM // 2 - 10)
    prompt = [3 + i % 500 for i in range(ROOM // 2)]
    ended: list[int] = []

    async def ask(priority: int) -> None:
        other = [105 + priority, *prompt, *prompt[: ROOM // 4]]
        await client.generate(other, GREEDY, priority=priority, deadline_s=DEADLINE_S)
        ended.append(priority)

    with hook.slowly():
        first = Streamed(client, prompt, room, priority=100, deadline_s=DEADLINE_S)
        await first.reached(1)
        asked: list[asyncio.Task[None]] = []
        for n_before, priority in enumerate(PRIORITIES):
            asked.append(asyncio.create_task(ask(priority)))
            await load_when(client, lambda told, n=n_before: told["num_waiting_reqs"] > n)
        await first.cut()
    await asyncio.gather(*asked)

    assert ended == sorted(PRIORITIES, reverse=True)


@pytest.mark.shows("out of memory is recognised", "retry after out of memory")
async def test_an_engine_that_runs_out_of_memory_says_so_and_its_request_goes_on(
    fleet: Fleet, client: RolloutClient, llama: Path, hook: Hook
) -> None:
    hook.wants_too_much()
    prompt = [5, 6, EXHAUSTING_TOKEN, 7]

    rollout = await client.generate(prompt, GREEDY, deadline_s=RESTART_S)

    assert rollout.n_attempts > 1
    assert rollout.tokens.tolist() == SameWeights(llama).likeliest(prompt, rollout)
    told = log_of(fleet)
    print([line for line in told.splitlines() if "out of memory" in line])
    assert "out of memory (lower `mem_fraction_static`" in told
