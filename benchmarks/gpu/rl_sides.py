"""The two loops that `rl_loop.py` compares, each in a process of its own.

Reads one JSON line per turn from standard input and answers with one on standard output.
"""

import asyncio
import importlib
import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

import rolloutbus
from benchmarks.gpu.rl_training import Asked, Load, Sampled, StepReport, Trainer, asked
from rolloutbus import Rollout, RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.engine_worker.engines.sglang.settings import SglangSettings
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.arguments import server_arguments

DEADLINE_S = 300.0
Groups = list[tuple[Asked, list[Rollout]]]
"""Each with its rollouts."""


class Turn(msgspec.Struct, frozen=True):
    """What is asked for: so many steps, of groups from this number on."""

    steps: int
    first_group: int


class Span(msgspec.Struct, frozen=True):
    """Something that the loop did or waited for; moments of time.perf_counter()."""

    what: str
    began: float
    ended: float


class TurnReport(msgspec.Struct):
    """What a loop did in a turn."""

    ends: list[float] = []
    """When the engine had the weights of each step; moments of time.perf_counter()."""
    spans: list[Span] = []
    steps: list[StepReport] = []
    oldest: int = 0
    """Versions that the oldest token trained on lay behind."""

    def note(self, what: str, began: float) -> float:
        """Something that began then has ended; returns this moment."""
        ended = time.perf_counter()
        self.spans.append(Span(what, began, ended))
        print(f"  {what} {ended - began:.2f} s", file=sys.stderr, flush=True)
        return ended


# --------------------------------------------------------------------------------------------------
# Synchronous: an engine in this process


class Synchronous:
    """Samples a batch, trains on it, gives the engine the weights; one after another."""

    def __init__(self, folder: Path, load: Load, engine: dict[str, Any]) -> None:
        arguments = engine.pop("arguments")
        if load.device == "cuda":
            arguments["base_gpu_id"] = 1
        settings = SglangSettings(model=str(folder), arguments=arguments, **engine)
        chosen = server_arguments(settings, upstream.server_argument_types())
        self._engine: Any = importlib.import_module("sglang").Engine(**chosen)
        self._load = load
        self._trainer = Trainer(folder, load)

    def turn(self, turn: Turn) -> TurnReport:
        """Take so many steps."""
        self._give_weights()
        report = TurnReport()
        for step in range(turn.steps):
            began = time.perf_counter()
            first = turn.first_group + step * self._load.groups
            groups = self._sample(
                [asked(self._load, first + place) for place in range(self._load.groups)]
            )
            began = report.note("sample", began)
            report.steps.append(self._trainer.step(groups))
            began = report.note("train", began)
            self._give_weights()
            report.ends.append(report.note("weights", began))
        self._trainer.rest()
        return report

    def _sample(self, batch: list[Asked]) -> list[Sampled]:
        answers: list[dict[str, Any]] = self._engine.generate(
            input_ids=[each.prompt for each in batch for _ in each.lengths],
            sampling_params=[
                {"max_new_tokens": n, "temperature": 1.0, "ignore_eos": True}
                for each in batch
                for n in each.lengths
            ],
            return_logprob=True,
        )
        rows = iter(answers)
        return [_from_sglang(each.prompt, [next(rows) for _ in each.lengths]) for each in batch]

    def _give_weights(self) -> None:
        """SGLang's own way for tensors of this process; they have to lie on the engine's GPU."""
        weights = self._trainer.weights()
        if self._load.device == "cuda":
            weights = {name: each.to("cuda:1") for name, each in weights.items()}
        is_taken, why = self._engine.update_weights_from_tensor([*weights.items()])
        if not is_taken:
            raise SystemExit(f"the engine did not take the weights: {why}")


def _from_sglang(prompt: list[int], rows: list[dict[str, Any]]) -> Sampled:
    told = [row["meta_info"]["output_token_logprobs"] for row in rows]
    return Sampled(
        prompt, [row["output_ids"] for row in rows], [[each[0] for each in row] for row in told]
    )


def main_synchronous(folder: Path, load: Load, engine: dict[str, Any]) -> None:
    """Start an engine and take turns until the input ends."""
    loop = Synchronous(folder, load, engine)
    for line in iter(sys.stdin.readline, ""):
        print(_encoded(loop.turn(msgspec.json.decode(line, type=Turn))), flush=True)


# --------------------------------------------------------------------------------------------------
# Asynchronous: over the bus


class OverBus:
    """Trains while a worker samples, as far ahead as the bound on staleness allows."""

    def __init__(self, trainer: Trainer, load: Load, client: RolloutClient) -> None:
        self._trainer = trainer
        self._load = load
        self._client = client
        self._publisher = WeightPublisher(client)

    async def turn(self, turn: Turn) -> TurnReport:
        """Take so many steps."""
        version = await self._publish()
        report = TurnReport()
        ahead = SamplingAhead(self._client, self._load, turn.first_group)
        try:
            for step in range(turn.steps):
                ahead.admit(step)
                began = time.perf_counter()
                groups = await ahead.take()
                began = report.note("wait", began)
                oldest = min(int(row.token_versions.min()) for _, rows in groups for row in rows)
                report.oldest = max(report.oldest, version - oldest)
                report.steps.append(await asyncio.to_thread(self._train, groups))
                began = report.note("train", began)
                version = await self._publish()
                report.ends.append(report.note("weights", began))
        finally:
            await ahead.close()
            self._trainer.rest()
        if report.oldest > self._load.bound:
            raise SystemExit(f"a token lay {report.oldest} versions behind, {self._load.bound} may")
        return report

    def _train(self, groups: Groups) -> StepReport:
        return self._trainer.step(
            [
                Sampled(
                    group.prompt,
                    [row.tokens.tolist() for row in rows],
                    [row.logprobs.tolist() for row in rows],
                )
                for group, rows in groups
            ]
        )

    async def _publish(self) -> int:
        published = await self._publisher.publish(
            self._trainer.weights(), in_flight="keep", require="all", deadline_s=DEADLINE_S
        )
        return published.version


class SamplingAhead:
    """Begins batches of groups as far ahead of the trainer as the bound allows.

    When s steps are done, batches 0 to s + bound have begun, and step s trains on batch s: it began
    `bound` steps before, or at the start. No other order keeps to the bound: whoever trains on
    a younger group first has an older one left over that comes too late. So the trainer waits for
    whoever is late.
    """

    def __init__(self, client: RolloutClient, load: Load, first_group: int) -> None:
        self._client = client
        self._load = load
        self._next_group = first_group
        self._n_begun = 0
        self._open: deque[asyncio.Future[Groups]] = deque()
        """Batches in order."""

    def admit(self, step: int) -> None:
        """Begin what the bound allows, now that so many steps are done."""
        while self._n_begun <= step + self._load.bound:
            numbers = range(self._next_group, self._next_group + self._load.groups)
            groups = [self._sample(asked(self._load, number)) for number in numbers]
            self._open.append(asyncio.gather(*groups))
            self._next_group += self._load.groups
            self._n_begun += 1

    async def take(self) -> Groups:
        """Wait for the oldest batch that was not taken."""
        return await self._open.popleft()

    async def close(self) -> None:
        """Abort what still runs."""
        for batch in self._open:
            batch.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _sample(self, group: Asked) -> tuple[Asked, list[Rollout]]:
        samples = (
            self._client.generate(
                group.prompt,
                SamplingParams(max_new_tokens=n, temperature=1.0, ignore_eos=True),
                deadline_s=DEADLINE_S,
            )
            for n in group.lengths
        )
        return group, await asyncio.gather(*samples)


async def main_over_bus(folder: Path, load: Load, engine: dict[str, Any]) -> None:
    """Start a fleet and take turns until the input ends."""
    trainer = Trainer(folder, load)
    reading = asyncio.get_running_loop().run_in_executor
    up = rolloutbus.up(
        model=folder,
        workers=1,
        engine="sglang",
        engine_options=engine,
        gpus=[[1]] if load.device == "cuda" else [],
    )
    async with up as fleet, rolloutbus.connect(fleet.address, name="trainer") as client:
        loop = OverBus(trainer, load, client)
        while line := await reading(None, sys.stdin.readline):
            print(_encoded(await loop.turn(msgspec.json.decode(line, type=Turn))), flush=True)


def _encoded(report: TurnReport) -> str:
    return msgspec.json.encode(report).decode()


def main() -> None:
    """Start one loop and serve."""
    side, folder, load, engine = sys.argv[1:]
    given = (Path(folder), msgspec.json.decode(load, type=Load), json.loads(engine))
    if side == "synchronous":
        main_synchronous(*given)
    else:
        asyncio.run(main_over_bus(*given))


if __name__ == "__main__":
    main()
