"""The real SGLang keeps an account of weight versions of its own: ours are compared with it."""

import asyncio
import importlib.metadata
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import rolloutbus
from rolloutbus import RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.bus.wire.messages.control import Load, ServerFacts
from rolloutbus.bus.wire.messages.weights import InFlight
from rolloutbus.engine_worker.engines.sglang.upstream import hooks
from rolloutbus.errors import EngineFailed
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.live_fleet import Streamed
from tests.integration.reference import Reference
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import fleet_of
from tests.sglang.models import ENDLESS
from tests.sglang.removed_functions import forget_versions

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5, 6, 7, 8]
LONG = SamplingParams(max_new_tokens=ENDLESS, ignore_eos=True)
SOME = SamplingParams(max_new_tokens=200, ignore_eos=True)
FEW = SamplingParams(max_new_tokens=6, ignore_eos=True)
MODES: tuple[InFlight, ...] = ("keep", "retract", "keep", "abort")


def keeps_account() -> bool:
    """Whether the installed version does: of those that are tested, all but this one."""
    try:
        return importlib.metadata.version("sglang") != "0.5.17"
    except importlib.metadata.PackageNotFoundError:  # an environment without it skips all of these
        return False


@asynccontextmanager
async def client_of(model: Path) -> AsyncGenerator[RolloutClient]:
    async with rolloutbus.up(**fleet_of(model)) as fleet:
        settings = ClientSettings(name="tests", router=fleet.address, overtime_s=DEADLINE_S)
        async with RolloutClient(settings) as client:
            yield client


async def publish(publisher: WeightPublisher, reference: Reference, in_flight: InFlight) -> int:
    reference.perturb(1)
    published = await publisher.publish(
        reference.model.named_parameters(),
        in_flight=in_flight,
        require="all",
        deadline_s=DEADLINE_S,
    )
    return published.version


async def gauges_of(client: RolloutClient) -> Mapping[str, float]:
    return (await client.get_load()).only(Load).gauges


async def counted(client: RolloutClient) -> tuple[float, float]:
    """Requests that were checked, and of them those with wrong versions."""
    gauges = await gauges_of(client)
    return gauges["versions_checked"], gauges["versions_contradicted"]


@pytest.mark.skipif(keeps_account(), reason="this SGLang keeps an account of versions")
async def test_without_an_account_no_check_is_claimed(client: RolloutClient) -> None:
    assert hooks.VERSION_CHECK not in (await client.server_info()).only(ServerFacts).features
    assert "versions_checked" not in await gauges_of(client)


@pytest.mark.shows("update_weight_version")
@pytest.mark.skipif(not keeps_account(), reason="this SGLang keeps no account of versions")
async def test_versions_pass_the_check_where_there_is_one(llama: Path) -> None:
    async with client_of(llama) as client:
        info = (await client.server_info()).only(ServerFacts)
        assert hooks.VERSION_CHECK in info.features
        publisher, reference = WeightPublisher(client), Reference(llama)
        streamed = Streamed(client, PROMPT, LONG, deadline_s=DEADLINE_S)
        await streamed.reached(10)
        others = [
            asyncio.create_task(client.generate(PROMPT, SOME, deadline_s=DEADLINE_S))
            for _ in range(3)
        ]
        for mode in MODES:
            await publish(publisher, reference, mode)
            await streamed.grown_by(10)
        rollout = await streamed.cut()
        assert len(rollout.version_runs) == len(MODES) + 1
        for other in await asyncio.gather(*others):
            assert len(other.tokens) == SOME.max_new_tokens
        last = await client.generate(PROMPT, FEW, deadline_s=DEADLINE_S)
        assert [version for version, _ in last.version_runs] == [len(MODES)]
        n_checked, n_contradicted = await counted(client)
        assert n_contradicted == 0
        # Those that an update aborted were checked at their abort, too.
        assert n_checked >= len(others) + 2
        publisher.forget()


@pytest.mark.skipif(not keeps_account(), reason="this SGLang keeps no account of versions")
async def test_versions_that_are_wrong_fail_their_request(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_versions(monkeypatch, 0)
    async with client_of(llama) as client:
        rollout = await client.generate(PROMPT, FEW, deadline_s=DEADLINE_S)
        assert [version for version, _ in rollout.version_runs] == [0]
        publisher = WeightPublisher(client)
        assert await publish(publisher, Reference(llama), "keep") == 1
        with pytest.raises(EngineFailed, match=r"version 0, and by SGLang's own account .* of 1"):
            await client.generate(PROMPT, FEW, deadline_s=DEADLINE_S)
        n_checked, n_contradicted = await counted(client)
        assert n_contradicted >= 1
        assert n_checked > n_contradicted
        publisher.forget()
