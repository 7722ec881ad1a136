"""Turns of a session on the real SGLang: appended, branched from, replaced, streamed."""

from pathlib import Path

import pytest

import rolloutbus
from rolloutbus import RolloutClient, SamplingParams
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration import session_steps
from tests.integration.live_fleet import Streamed
from tests.integration.session_steps import GREEDY, OPTIONS, Steps, n_cached
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import engine_options, fleet_of
from tests.sglang.models import ENDLESS

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def steps(client: RolloutClient) -> Steps:
    return Steps(client, block=1)


@pytest.mark.shows(
    "generate_with_session",
    "cached_tokens",
    "open_session",
    "supports_sessions",
    "session_params.rid",
)
async def test_appended_turns_find_the_turns_before_them_in_the_cache(steps: Steps) -> None:
    await session_steps.appended_turns_find_the_turns_before_them(steps)


@pytest.mark.shows("session_params.offset")
async def test_branches_find_what_they_share_in_the_cache(steps: Steps) -> None:
    await session_steps.branches_find_what_they_share(steps)


@pytest.mark.shows("session_params.replace", "session_params.drop_previous_output")
async def test_a_replaced_turn_finds_what_was_before_it_in_the_cache(steps: Steps) -> None:
    await session_steps.a_replaced_turn_finds_what_was_before_it(steps)


@pytest.mark.shows("session streams")
async def test_streamed_turns_are_turns_like_others(steps: Steps) -> None:
    await session_steps.streamed_turns_are_turns(steps)


@pytest.mark.shows("reset_running_requests")
async def test_prefixes_are_reset_also_of_what_runs_which_goes_on(client: RolloutClient) -> None:
    long = SamplingParams(max_new_tokens=ENDLESS, temperature=1.0, ignore_eos=True)
    streamed = Streamed(client, [5, 6, 7], long)
    await streamed.reached(20)

    result = await client.reset_prefix_cache(reset_running_requests=True, deadline_s=DEADLINE_S)

    assert result.errors == {}
    await streamed.grown_by(20)
    assert streamed.is_contiguous
    assert (await streamed.cut()).n_attempts == 2


@pytest.mark.shows("enable_session_radix_cache")
async def test_sessions_are_forgotten_last_and_least_recently_used_first(llama: Path) -> None:
    # Room for half of what is asked for below, and for the marks of 8 sessions.
    engine = engine_options(enable_session_radix_cache=True, max_total_tokens=3000)
    options: UpOptions = {**fleet_of(llama), "engine_options": {**engine, "slots": 2}}
    async with rolloutbus.up(**options) as fleet:
        settings = ClientSettings(name="labels", router=fleet.address, overtime_s=DEADLINE_S)
        async with RolloutClient(settings) as client:

            async def ask(number: int, session: str = "") -> int:
                prompt = [3 + number, *([40 + number] * (450 if session == "" else 100))]
                own: GenerateOptions = {**OPTIONS, "session": session}
                rollout = await client.generate(prompt, GREEDY, **own)
                return n_cached(rollout)

            async def press() -> None:
                for number in range(100, 108):
                    await ask(number)

            await ask(0)
            await ask(1, "marked")
            await press()
            assert await ask(0) == 0
            assert await ask(1, "marked") == 100
            for number in range(2, 10):
                await ask(number, f"newer-{number}")
            await press()
            assert await ask(9, "newer-9") == 100
            assert await ask(1, "marked") == 0
