"""What the engines of a fleet cannot do ends by name at the client, through router and worker."""

import pytest

from rolloutbus import Grammar, Media, Processor, RolloutClient, SamplingParams, Want
from rolloutbus.bus.wire.errors import EngineFailed, Refused
from rolloutbus.bus.wire.messages.control import ServerFacts
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.trainer_adapter.client.asks import GenerateOptions
from rolloutbus.types import FleetResult

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {"workers": 1, "engine": "fake", "store": False}
WISHES: list[tuple[GenerateOptions, str]] = [
    ({"want": Want(top_logprobs=1)}, "want.top_logprobs"),
    ({"grammar": Grammar("json_schema", "{}")}, "grammar"),
    ({"processors": [Processor("mask")]}, "processors"),
    ({"media": [Media("image", bytes(100_000))]}, "media"),
    ({"lora": "judge"}, "lora"),
]


def the_error(result: FleetResult) -> EngineFailed:
    (error,) = result.errors.values()
    assert isinstance(error, EngineFailed)
    return error


@pytest.mark.parametrize(("options", "field"), WISHES)
async def test_a_wish_that_no_engine_here_can_grant_fails_by_its_field(
    client: RolloutClient, options: GenerateOptions, field: str
) -> None:
    with pytest.raises(EngineFailed) as caught:
        await client.generate([3, 4], SamplingParams(max_new_tokens=3), **options)
    error = caught.value
    assert (error.code, error.outcome, error.problem.field) == ("unsupported", "not_started", field)


async def test_a_wish_that_no_engine_could_grant_is_refused(client: RolloutClient) -> None:
    with pytest.raises(Refused) as caught:
        await client.generate([3, 4], SamplingParams(max_new_tokens=3, stop=["x" * 257]))
    assert caught.value.code == "bad_request"
    assert "stop" in caught.value.problem.field


async def test_commands_that_the_engine_lacks_are_unsupported(client: RolloutClient) -> None:
    with pytest.raises(EngineFailed) as caught:
        await client.score([3], [[4]], [5])
    assert caught.value.code == "unsupported"
    for result in (
        await client.load_lora("judge", 1, path="judge", check=False),
        await client.start_profile(check=False),
        await client.get_load(check=False),
        await client.flush_cache(["host"], check=False),
    ):
        assert the_error(result).code == "unsupported"


async def test_server_info_tells_what_there_is(client: RolloutClient) -> None:
    facts = (await client.server_info()).only(ServerFacts)
    assert {"min_new_tokens", "seed"} <= set(facts.features)
    assert (facts.adapters, facts.asleep) == ({}, [])


async def test_after_all_that_the_worker_serves(client: RolloutClient) -> None:
    rollout = await client.generate(
        [3, 4], SamplingParams(max_new_tokens=3, sampling_seed=1, ignore_eos=True)
    )
    assert len(rollout.tokens) == 3
