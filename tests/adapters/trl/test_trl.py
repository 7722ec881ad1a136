"""TRL's own trainers train on a fleet, in an environment and processes of their own."""

import asyncio
import os
import re
import signal
from asyncio.subprocess import Process
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus import Fleet, OfflineRollouts
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.examples.tiny_model import build_tiny_model
from tests.adapters.programs import DEADLINE_S, Line, lines_of, program
from tests.integration.live_fleet import PATIENT, recorded

HERE = Path(__file__).parent
N_STEPS = 20
FROZEN_S = 10.0
BATCH = 8
N_EACH = 4
"""Samples of a group."""
N_UNDER_WAY = 8
"""Groups that may be sampled, or wait for the trainer, when it ends; 8 and 16 samples."""
N_STALE = 4
POISONED = 16
"""The step after which an update fails."""
NOT_FINITE = "model.embed_tokens.weight"
"""What such an update is refused for."""
N_TOKENS = 12

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.timeout(1200),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trl") / "tiny"
    build_tiny_model(path, seed=0)
    return path


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(model: Path, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    """One whose leases end soon, as faults want it, unless a test asks for others."""
    async with rolloutbus.up(
        model=model,
        workers=2,
        engine_options={"threads": 1},
        lease=getattr(request, "param", LeaseSettings()),
        tap=True,
    ) as running:
        yield running


WITHOUT_FAULTS = pytest.mark.parametrize("fleet", [PATIENT], indirect=True, ids=["patient"])


class Training:
    """A trainer under way."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._lines = lines_of(process)
        self.kill = process.kill
        self.told: list[Line] = []
        """All lines so far."""

    async def step(self) -> Line | None:
        """What it tells of the next step; None at its end."""
        async for line in self._heard():
            if "loss" in line:  # the last one sums up
                return line
        return None

    async def ended(self) -> None:
        """Wait until neither it nor a process that it began can write any more."""
        assert self._process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while await self._process.stdout.readline():
                pass

    async def _heard(self) -> AsyncGenerator[Line]:
        async for line in self._lines:
            self.told.append(line)
            yield line

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


@WITHOUT_FAULTS
async def test_grpo_samples_from_what_it_has_just_trained(fleet: Fleet, train: Train) -> None:
    async with train("grpo_program.py", N_STEPS, "--how server") as trainer:
        steps = await trainer.steps()

    assert [line["step"] for line in steps] == [*range(1, N_STEPS + 1)]
    assert_on_policy(steps)
    async with rolloutbus.connect(fleet.address) as client:
        status = await client.status()
    assert {each.version for each in status.workers} == {N_STEPS}


async def test_a_run_goes_on_through_faults(fleet: Fleet, train: Train) -> None:
    options = f"--how function --poison {POISONED}"
    steps: list[Line] = []
    async with train("grpo_program.py", N_STEPS, options) as trainer:
        while (line := await trainer.step()) is not None:
            steps.append(line)
            if line["step"] == 4:
                fleet.kill("w0")
            elif line["step"] == 8:
                fleet.kill_router()
            elif line["step"] == 12:
                freeze(fleet, "w1")

    assert [line["step"] for line in steps] == [*range(1, N_STEPS + 1)]
    assert any(NOT_FINITE in line["warned"] for line in trainer.told if "warned" in line)
    versions = [{version for runs in line["runs"] for version, _ in runs} for line in steps]
    assert all(len(each) == 1 for each in versions), "each step is sampled from one version"
    flat = [version for each in versions for version in each]
    assert flat == sorted(set(flat)), "each step publishes, and samples from what it published"
    for line in steps:
        assert [sum(n for _, n in runs) for runs in line["runs"]] == [N_TOKENS] * BATCH


@WITHOUT_FAULTS
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


@WITHOUT_FAULTS
@pytest.mark.parametrize("how", ["server", "function"])
async def test_each_completion_has_the_form_that_is_asked_for(how: str, train: Train) -> None:
    async with train("grpo_program.py", 1, f"--how {how} --regex [ab]{{3}}") as trainer:
        [step] = await trainer.steps()

    assert len(step["texts"]) == BATCH
    for text in step["texts"]:  # the tokenizer has spaces between its letters
        assert re.fullmatch("[ab]{3}", text.replace(" ", ""))


@WITHOUT_FAULTS
async def test_async_grpo_asks_for_a_form_too(train: Train) -> None:
    async with train("async_program.py", 1, "--regex [ab]{3}") as trainer:
        await trainer.steps()

    texts = [line["text"] for line in trainer.told if "text" in line]
    assert len(texts) >= BATCH
    for text in texts:
        assert re.search("=[ab]{3}$", text.replace(" ", ""))


async def test_async_grpo_knows_how_stale_its_samples_are(
    fleet: Fleet, train: Train, tmp_path: Path
) -> None:
    async with (
        recorded(fleet, tmp_path / "journal"),
        train("async_program.py", N_STEPS) as trainer,
    ):
        steps: list[Line] = []
        while (line := await trainer.step()) is not None:
            steps.append(line)
            if line["step"] == 4:
                fleet.kill("w0")

    assert [line["step"] for line in steps] == [*range(1, N_STEPS + 1)]
    assert steps[0]["sample/staleness_max"] == 0
    assert steps[0]["ratio"] == pytest.approx(1, abs=1e-4)
    stale = [line["sample/staleness_max"] for line in steps]
    assert 0 < max(stale) <= N_STALE, "it is asynchronous, within the bound"
    assert_counted_as_recorded(trainer.told, tmp_path / "journal")


async def test_async_grpo_goes_on_through_faults(
    fleet: Fleet, train: Train, *, is_exhaustive: bool
) -> None:
    if not is_exhaustive:
        pytest.skip("left to `make nightly`")
    steps: list[Line] = []
    async with train("async_program.py", N_STEPS, f"--poison {POISONED}") as trainer:
        while (line := await trainer.step()) is not None:
            steps.append(line)
            if line["step"] == 4:
                fleet.kill("w0")
            elif line["step"] == 8:
                fleet.kill_router()
            elif line["step"] == 12:
                freeze(fleet, "w1")

    assert [line["step"] for line in steps] == [*range(1, N_STEPS + 1)]
    assert any(NOT_FINITE in line["warned"] for line in trainer.told if "warned" in line)
    assert sum(line.get("fleet/failed_updates", 0) for line in steps) > 0
    assert max(line["sample/staleness_max"] for line in steps) <= N_STALE
    groups = groups_of(trainer.told)
    published = set(numbers_of(trainer.told).values())
    assert {line["of"] for group in groups.values() for line in group} <= published, (
        "no sample is counted as of an update that failed"
    )


async def test_who_trains_the_same_policy_is_noticed(
    fleet: Fleet, model: Path, *, is_exhaustive: bool
) -> None:
    if not is_exhaustive:
        pytest.skip("left to `make nightly`")
    command = (HERE / "two_trainers_program.py", fleet.address, model)
    async with program("trl", *command) as process:
        said, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert b"version_unavailable: policy 'default' is at version 2" in said


@pytest.mark.parametrize("when", ["while it starts", "at a step"])
async def test_a_killed_trainer_leaves_no_process(
    fleet: Fleet, train: Train, when: str, *, is_exhaustive: bool
) -> None:
    if not is_exhaustive:
        pytest.skip("left to `make nightly`")
    async with (
        train("async_program.py", N_STEPS) as trainer,
        rolloutbus.connect(fleet.address) as client,
    ):
        if when == "at a step":
            assert await trainer.step() is not None
            assert (await client.status()).n_clients > 1
        else:
            async with asyncio.timeout(DEADLINE_S):
                # With the first weights it starts its child, which takes seconds to get ready.
                while not (await client.status()).committed.get("default"):
                    pass
        trainer.kill()
        await trainer.ended()
        async with asyncio.timeout(DEADLINE_S):
            while (await client.status()).n_clients > 1:
                pass


def freeze(fleet: Fleet, worker: str) -> None:
    """Stop it for FROZEN_S from now on."""
    frozen = fleet.pids[worker]
    os.kill(frozen, signal.SIGSTOP)
    asyncio.get_running_loop().call_later(FROZEN_S, os.kill, frozen, signal.SIGCONT)


def assert_on_policy(steps: list[Line]) -> None:
    """What the fleet says of each token's likelihood is what the trainer computes."""
    for line in steps:
        for end in ("min", "max"):
            ratio = line[f"sampling/importance_sampling_ratio/{end}"]
            assert ratio == pytest.approx(1, abs=1e-4)


def numbers_of(told: list[Line]) -> dict[int, int]:
    """Version of the fleet -> the trainer's number of the weights in it."""
    numbers = {0: 0}
    for line in told:
        if "update" in line:  # one that failed tells the version before
            numbers.setdefault(line["version"], line["update"])
    return numbers


def groups_of(told: list[Line]) -> dict[int, list[Line]]:
    """The samples that the trainer took, by group: each came whole, once, and none was lost."""
    groups = defaultdict[int, list[Line]](list)
    for line in told:
        if "group" in line:
            groups[line["group"]].append(line)
    *whole, last = groups
    assert {len(groups[each]) for each in whole} == {N_EACH}
    assert len(groups[last]) <= N_EACH
    assert set(range(max(groups) - N_UNDER_WAY)) <= groups.keys()
    return groups


def assert_counted_as_recorded(told: list[Line], journal: Path) -> None:
    """No sample is counted as fresher than the weights that made its group's oldest token."""
    number_of = numbers_of(told)
    versions = defaultdict[tuple[int, ...], set[int]](set)
    for each in OfflineRollouts(journal):
        versions[*each.prompt.tolist(), *each.rollout.tokens.tolist()].add(each.oldest_version)
    n_exact = 0
    for group in groups_of(told).values():
        sampled = [versions[tuple(line["tokens"])] for line in group]
        assert all(sampled), "a worker sampled each of them"
        [counted] = {line["of"] for line in group}
        # Two rollouts may have the same tokens: either may be the one.
        assert counted <= number_of[min(map(max, sampled))]
        n_exact += counted == number_of[min(map(min, sampled))]
    assert n_exact > 0
