"""A real model's logprobs are those of the version they name, also where a host died mid-commit."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from rolloutbus import RolloutClient, SamplingParams, WeightPublisher, connect
from rolloutbus.bus.wire.messages.weights import Transport
from rolloutbus.launcher.fleet import Fleet
from rolloutbus.launcher.plan import STORE
from rolloutbus.launcher.settings import FleetSettings
from rolloutbus.trainer_adapter.publisher.transfer import (
    Published,
    TransferProgress,
    WeightTransferHandle,
)
from rolloutbus.types import FleetStatus
from tests.drills.chaos.proxy import ProxyLink
from tests.drills.weights.cases import Case
from tests.drills.weights.gates import Gates
from tests.drills.weights.orders import Order, Told
from tests.integration.conftest import MAX_CONTEXT
from tests.integration.live_fleet import (
    DEADLINE_S,
    ENDLESS,
    PATIENT,
    START_S,
    Streamed,
    status_when,
)
from tests.integration.reference import Reference

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

WORKERS = ["w0", "w1"]
N_STREAMS, N_TOKENS = 8, 20
TOLERANCE = 1e-4
TEMPERATURE = 0.8
PROMPTS = [[3 + i, 10, 20 + i, 7] for i in range(N_STREAMS)]
LONG = SamplingParams(max_new_tokens=ENDLESS, temperature=TEMPERATURE, ignore_eos=True)


class LocalTrainer:
    """Implements `Trainer` in this process, with weights that are known here."""

    def __init__(self, client: RolloutClient, reference: Reference) -> None:
        self._publisher = WeightPublisher(client)
        self._reference = reference
        self._handle: WeightTransferHandle | None = None

    def publish(self, order: Order) -> None:
        self._reference.perturb(seed=int(order.value))
        self._handle = self._publisher.start(
            self._reference.model.state_dict(),
            transport=order.transport,
            in_flight=order.in_flight,
            deadline_s=START_S,
        )

    @property
    def progress(self) -> TransferProgress:
        """Of what was published last."""
        assert self._handle is not None
        return self._handle.progress

    async def reached(self, is_so: Callable[[Told], bool], timeout_s: float) -> bool:
        del timeout_s  # the publication has its own deadline
        assert self._handle is not None
        async for now in self._handle.changes():
            if is_so(Told(now.phase, now.version, now.n_prepared, now.n_active)):
                return True
        return False

    async def result(self) -> Published:
        """What became of it; names each worker that is not active, and says why."""
        assert self._handle is not None
        return await self._handle

    async def outcome(self, timeout_s: float) -> Told:
        del timeout_s
        published = await self.result()
        self._reference.keep(published.version)
        return Told("committed", published.version, outcome="committed", by=published.transport)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def links() -> AsyncIterator[dict[str, ProxyLink]]:
    async with AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(ProxyLink()) for name in (*WORKERS, STORE)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tiny_model: Path, links: dict[str, ProxyLink]) -> AsyncIterator[Fleet]:
    """Its members' links can be held; they run in this loop, which may be busy for seconds."""

    def wire(name: str, backend: str) -> str:
        links[name].upstream = backend
        return links[name].endpoint

    options = {"threads": 1, "slots": N_STREAMS, "kv_tokens": N_STREAMS * MAX_CONTEXT}
    settings = FleetSettings(
        workers=len(WORKERS),
        model=tiny_model,
        engine_options=options,
        transport="tcp",
        lease=PATIENT,
    )
    async with Fleet(settings, wiring=wire) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[RolloutClient]:
    async with connect(fleet.address, name="logprobs-after-faults") as connected:
        yield connected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_logprobs_are_true_after_a_host_died_before_it_could_swap(
    fleet: Fleet,
    links: dict[str, ProxyLink],
    client: RolloutClient,
    reference: Reference,
    transport: Transport,
    seed: int,
) -> None:
    ahead = seed % len(WORKERS)
    victim = WORKERS[1 - ahead]
    case = Case("host", "committing", transport, "staged", "retract", "any", ahead, False)  # noqa: FBT003
    trainer, gates = LocalTrainer(client, reference), Gates(fleet, links)
    await status_when(client, _all_are_ready)
    streams = [Streamed(client, prompt, LONG, deadline_s=2 * START_S) for prompt in PROMPTS]
    for streamed in streams:
        await streamed.reached(N_TOKENS)
    try:
        order = Order(float(seed % 1000), transport, in_flight="retract")
        is_there = await gates.bring_to(case, trainer, order)
        assert is_there, f"the update was over too soon: {trainer.progress}"
        struck = [streamed for streamed in streams if streamed.worker == victim]
        fleet.kill_engine_host(victim)
    finally:
        gates.open_all()
    told = await trainer.outcome(DEADLINE_S)
    await status_when(client, lambda status: _all_serve(status, told.version), START_S)
    for streamed in streams:
        await streamed.grown_by(N_TOKENS)
    rollouts = [await streamed.cut() for streamed in streams]

    assert told.by[WORKERS[ahead]] == transport
    assert struck, "nothing ran on the victim: the test tested nothing"
    assert all(len(rollout.version_runs) > 1 for rollout in rollouts)
    for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
        # In a thread: the members' links run in this loop.
        truth = await asyncio.to_thread(reference.fresh, prompt, rollout, TEMPERATURE)
        assert np.abs(truth - rollout.logprobs).max() < TOLERANCE, rollout.version_runs


def _all_are_ready(status: FleetStatus) -> bool:
    return [each.state for each in status.workers] == ["ready"] * len(WORKERS)


def _all_serve(status: FleetStatus, version: int) -> bool:
    rows = [(each.version, each.state) for each in status.workers]
    return rows == [(version, "ready")] * len(WORKERS)
