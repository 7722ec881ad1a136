"""A small run for pictures: training-like updates, a pause and a killed worker, all recorded.

Two workers with the demo's tiny model sample all the time; four versions of random weights are
published meanwhile, one worker is paused and one is killed.
"""

# pyright: reportUnknownMemberType=false
# torch's stubs leave parameters untyped.

import asyncio
from contextlib import suppress
from pathlib import Path
from random import Random

import torch

import rolloutbus
from rolloutbus import Fleet, RolloutClient, SamplingParams
from rolloutbus.bus.actor.loop import BootClock
from rolloutbus.errors import BusError
from rolloutbus.examples.task import draw_words, prompt_tokens
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model
from rolloutbus.trainer_adapter.client.engine_gauges import Gauges, loads_of
from rolloutbus.trainer_adapter.client.fleet_frames import TopFrame, TopHistory

N_CALLERS = 14
SLOTS = 6
MAX_NEW_TOKENS = 96
TRAIN_S = 1.1
PAUSE_S = 0.8
LOOK_EVERY_S = 0.5
DEADLINE_S = 60.0
MIN_LEFT = 25
MIN_UNDER_WAY = 4
"""A worker is killed when so many rollouts have so many tokens to come."""


class DemoRun:
    """What happens during one run."""

    def __init__(self, fleet: Fleet, client: RolloutClient, model_path: Path) -> None:
        self._fleet = fleet
        self._client = client
        self._model = load_tiny_model(model_path)
        self._publisher = rolloutbus.WeightPublisher(client)
        self._history = TopHistory()
        self._victim = ""
        self._is_over = False
        self._under_way: dict[int, tuple[str, int]] = {}
        """Caller -> worker of its rollout, and the tokens that are to come."""
        self.frames: list[TopFrame] = []

    async def run(self) -> None:
        """Everything, from the first rollout to the last."""
        async with asyncio.TaskGroup() as tasks:
            callers = [tasks.create_task(self._sample(number)) for number in range(N_CALLERS)]
            watcher = tasks.create_task(self._watch())
            await self._update()
            await self._update()
            await self._client.pause("in_place", target="w1")
            await asyncio.sleep(PAUSE_S)
            await self._client.resume(target="w1")
            await self._update()
            self._victim = "w0"
            await self._update()
            await self._is_complete()
            await asyncio.sleep(TRAIN_S)
            self._is_over = True
            await asyncio.wait(callers)
            watcher.cancel()

    async def _sample(self, number: int) -> None:
        rng = Random(number)  # noqa: S311 - it is to be the same again
        while not self._is_over:
            (word,) = draw_words(rng, 1)
            n_tokens = rng.randrange(MAX_NEW_TOKENS // 3, MAX_NEW_TOKENS)
            sampling = SamplingParams(
                max_new_tokens=n_tokens, ignore_eos=True, sampling_seed=number
            )
            n_left = n_tokens
            async for delta in self._client.stream(
                prompt_tokens(word), sampling, deadline_s=DEADLINE_S, session=f"caller-{number}"
            ):
                n_left -= len(delta.tokens)
                self._under_way[number] = delta.worker, n_left
                self._kill_when_it_hurts()
            self._under_way[number] = "", 0

    def _kill_when_it_hurts(self) -> None:
        """In the middle of several rollouts."""
        found = [n for worker, n in self._under_way.values() if worker == self._victim]
        if self._victim and sum(n > MIN_LEFT for n in found) >= MIN_UNDER_WAY:
            self._fleet.kill(self._victim)
            self._victim = ""

    async def _update(self) -> None:
        """A training step, of which only its traces matter."""
        await asyncio.sleep(TRAIN_S)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for parameter in self._model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        await self._publisher.publish(
            self._model.named_parameters(), in_flight="keep", deadline_s=DEADLINE_S
        )

    async def _is_complete(self) -> None:
        """Wait until the worker that was killed is there again."""
        while True:
            status = await self._client.status()
            if {each.name for each in status.workers if each.state == "ready"} == {"w0", "w1"}:
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def _watch(self) -> None:
        clock = BootClock()
        while True:
            status = await self._client.status()
            loads: Gauges = {}
            with suppress(BusError):
                loads = loads_of(await self._client.get_load(deadline_s=LOOK_EVERY_S, check=False))
            self.frames.append(self._history.frame(status, loads, clock.now()))
            await asyncio.sleep(LOOK_EVERY_S)


async def record_demo_run(directory: Path) -> list[TopFrame]:
    """Leave a journal in `directory`/journal; returns what `top` would have shown."""
    model_path = directory / "model"
    build_tiny_model(model_path, 0)
    options = {"threads": 1, "slots": SLOTS}
    async with (
        rolloutbus.up(model=model_path, workers=2, engine_options=options, tap=True) as fleet,
        rolloutbus.record(fleet.address, directory / "journal") as recorder,
        rolloutbus.connect(fleet.address, name="demo") as client,
    ):
        await recorder.caught_up(DEADLINE_S)
        run = DemoRun(fleet, client, model_path)
        await run.run()
        await recorder.caught_up(DEADLINE_S)
        return run.frames
