"""TRL's own trainers train on a fleet, in an environment and processes of their own."""

import asyncio
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus import Fleet
from rolloutbus.examples.tiny_model import build_tiny_model
from tests.adapters.programs import DEADLINE_S, Line, lines_of, program

HERE = Path(__file__).parent
N_STEPS = 20
FROZEN_S = 10.0
BATCH = 8
N_STALE = 4
N_TOKENS = 12

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trl") / "tiny"
    build_tiny_model(path, seed=0)
    return path


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(model: Path) -> AsyncIterator[Fleet]:
    async with rolloutbus.up(model=model, workers=2, engine_options={"threads": 1}) as running:
        yield running


class Training:
    """A trainer under way."""

    def __init__(self, process: Process) -> None:
        self._lines = lines_of(process)
        self.kill = process.kill

    async def step(self) -> Line | None:
        """What it tells of the next step; None at its end."""
        async for line in self._lines:
            if "loss" in line:  # the last one sums up
                return line
        return None

    async def steps(self) -> list[Line]:
        """Those of all steps that are left."""
        found: list[Line] = []
        while (line := await self.step()) is not None:
            found.append(line)
        return found


Train = Callable[..., AbstractAsyncContextManager[Training]]


@pytest.fixture
def train(fleet: Fleet, model: Path, tmp_path: Path) -> Train:
    """Starts a program of this folder: (its name, number of steps, its options, its launcher's)."""

    @asynccontextmanager
    async def training(
        program_name: str, n_steps: int, options: str = "", launcher: str = ""
    ) -> AsyncGenerator[Training]:
        command = (*launcher.split(), HERE / program_name, fleet.address, model, tmp_path)
        more = ("--steps", n_steps, *options.split())
        async with program("trl", *command, *more) as process:
            yield Training(process)

    return training


async def test_grpo_samples_from_what_it_has_just_trained(fleet: Fleet, train: Train) -> None:
    async with train("grpo_program.py", N_STEPS, "--how server") as trainer:
        steps = await trainer.steps()

    assert [line["step"] for line in steps] == [*range(1, N_STEPS + 1)]
    assert_on_policy(steps)
    async with rolloutbus.connect(fleet.address) as client:
        status = await client.status()
    assert {each.version for each in status.workers} == {N_STEPS}


async def test_a_run_goes_on_through_faults(fleet: Fleet, train: Train) -> None:
    # Shorter than the freeze: an update fails meanwhile, and is tried again.
    options = "--how function --deadline 6"
    steps: list[Line] = []
    async with train("grpo_program.py", N_STEPS, options) as trainer:
        while (line := await trainer.step()) is not None:
            steps.append(line)
            if line["step"] == 4:
                fleet.kill("w0")
            elif line["step"] == 8:
                fleet.kill_router()
            elif line["step"] == 12:
                frozen = fleet.pids["w1"]
                os.kill(frozen, signal.SIGSTOP)
                thaw = asyncio.get_running_loop().call_later
                thaw(FROZEN_S, os.kill, frozen, signal.SIGCONT)

    assert [line["step"] for line in steps] == [*range(1, N_STEPS + 1)]
    versions = [{version for runs in line["runs"] for version, _ in runs} for line in steps]
    assert all(len(each) == 1 for each in versions), "each step is sampled from one version"
    flat = [version for each in versions for version in each]
    assert flat == sorted(set(flat)), "each step publishes, and samples from what it published"
    for line in steps:
        assert [sum(n for _, n in runs) for runs in line["runs"]] == [N_TOKENS] * BATCH


async def test_two_ranks_train_an_adapter(train: Train) -> None:
    """The fleet has it merged into its weights: samples are as likely as the trainer computes."""
    launcher = (
        "-m accelerate.commands.launch --cpu --num_processes 2 --num_machines 1 "
        "--mixed_precision no --dynamo_backend no"
    )
    async with train("grpo_program.py", 4, "--how server --lora", launcher) as trainer:
        steps = await trainer.steps()

    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert_on_policy(steps)


async def test_async_grpo_knows_how_stale_its_samples_are(fleet: Fleet, train: Train) -> None:
    steps: list[Line] = []
    async with train("async_program.py", N_STEPS) as trainer:
        while (line := await trainer.step()) is not None:
            steps.append(line)
            if line["step"] == 4:
                fleet.kill("w0")

    assert [line["step"] for line in steps] == [*range(1, N_STEPS + 1)]
    assert steps[0]["sample/staleness_max"] == 0
    assert steps[0]["ratio"] == pytest.approx(1, abs=1e-4)
    stale = [line["sample/staleness_max"] for line in steps]
    assert 0 < max(stale) <= N_STALE, "it is asynchronous, within the bound"


async def test_who_trains_the_same_policy_is_noticed(
    fleet: Fleet, model: Path, *, is_exhaustive: bool
) -> None:
    if not is_exhaustive:
        pytest.skip("left to `make nightly`")
    command = (HERE / "two_trainers_program.py", fleet.address, model)
    async with program("trl", *command) as process:
        said, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert b"version_unavailable: policy 'default' is at version 2" in said


async def test_a_killed_trainer_leaves_no_process(
    fleet: Fleet, train: Train, *, is_exhaustive: bool
) -> None:
    if not is_exhaustive:
        pytest.skip("left to `make nightly`")
    async with (
        train("async_program.py", N_STEPS) as trainer,
        rolloutbus.connect(fleet.address) as client,
    ):
        assert await trainer.step() is not None
        assert (await client.status()).n_clients > 1
        trainer.kill()
        async with asyncio.timeout(DEADLINE_S):
            while (await client.status()).n_clients > 1:
                pass


def assert_on_policy(steps: list[Line]) -> None:
    """What the fleet says of each token's likelihood is what the trainer computes."""
    for line in steps:
        for end in ("min", "max"):
            ratio = line[f"sampling/importance_sampling_ratio/{end}"]
            assert ratio == pytest.approx(1, abs=1e-4)
