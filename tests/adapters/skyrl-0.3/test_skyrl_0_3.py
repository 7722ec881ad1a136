"""SkyRL 0.3.0's own generator and policy worker on a fleet: its interface, method by method."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import rolloutbus
from rolloutbus import Fleet, RolloutClient
from rolloutbus.bus.wire.messages.generation import CloseSession
from rolloutbus.errors import Refused
from tests.adapters.skyrl_runs import (
    LONG,
    WORDS,
    Refusal,
    Trainer,
    check_adapter,
    check_dialogues,
    check_page,
    check_word,
    facts,
    rows_of,
    running,
    said_after,
    save_counting_model,
    trainers,
)
from tests.integration.live_fleet import PATIENT
from tests.integration.reciting_model import UNDER_WAY

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.timeout(1200),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("skyrl") / "tiny"
    save_counting_model(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(model: Path) -> AsyncIterator[Fleet]:
    options = {"threads": 1}
    async with rolloutbus.up(
        model=model, workers=2, engine_options=options, lease=PATIENT
    ) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[RolloutClient]:
    async with rolloutbus.connect(fleet.address) as connected:
        yield connected


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(
    fleet: Fleet, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Trainer]:
    directory = tmp_path_factory.mktemp("ranks")
    async with trainers("0.3", fleet, model, directory, num_engines=0) as [only]:
        yield only


async def test_it_says_what_it_is(trainer: Trainer, model: Path) -> None:
    assert await trainer.do("sizes") == {
        **{f"{kind}_size": 1 for kind in ("tp", "pp", "dp", "ep")},
        "model_name": str(model),
        "get_endpoint_url": "http://gateway",
    }
    assert await trainer.call("get_world_size") == [2, 1]


async def test_a_batch_keeps_its_order_and_sessions_their_workers(
    trainer: Trainer, client: RolloutClient
) -> None:
    prompts = [[40, token] for token in range(16)]
    sessions = [f"trajectory_{token % 4}" for token in range(16)]
    told = await trainer.do("sample", prompts=prompts, max_tokens=6, sessions=sessions)

    output = told["output"]
    assert output["response_ids"] == [said_after(prompt, 6) for prompt in prompts]
    assert output["stop_reasons"] == ["length"] * 16
    assert [len(row) for row in output["response_logprobs"]] == [6] * 16
    assert len(set(zip(sessions, output["workers"], strict=True))) == 4

    await trainer.call("finish_session", session_id=sessions[0])
    await trainer.call("finish_session", session_id="never there")
    with pytest.raises(Refused, match="unknown_session"):
        await client.ref().ask(CloseSession(sessions[0]), deadline_s=60.0)


async def test_a_model_is_itself_or_an_adapter(trainer: Trainer, model: Path) -> None:
    batch = {"prompt_token_ids": [[2]], "sampling_params": {"max_tokens": 2}}
    output = await trainer.call("generate", input_batch=batch, model=str(model))
    assert output["response_ids"] == [said_after([2], 2)]
    assert output["response_logprobs"] is None, "nobody asked for them"
    with pytest.raises(Refusal, match="nobody"):
        await trainer.call("generate", input_batch=batch, model="nobody")


async def test_conversations_are_rendered_and_answered(trainer: Trainer, model: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    payload: dict[str, Any] = {"json": {"model": str(model), "messages": messages}}
    rendered = await trainer.call("render_chat_completion", request_payload=payload)
    prompt = rendered["token_ids"]
    more = {"max_tokens": 4, "return_token_ids": True, "ignore_eos": True}
    payload["json"] |= more
    answer = await trainer.call("chat_completion", request_payload=payload)
    assert answer["choices"][0]["token_ids"] == said_after(prompt, 4)

    payload = {"json": {"model": str(model), "prompt": prompt, **more}}
    answer = await trainer.call("completion", request_payload=payload)
    assert answer["choices"][0]["token_ids"] == said_after(prompt, 4)
    payload["json"]["max_tokns"] = 3
    answer = await trainer.call("completion", request_payload=payload)
    assert answer["error"]["code"] == 400


async def test_skyrls_policy_worker_sends_a_version(
    trainer: Trainer, client: RolloutClient
) -> None:
    await trainer.do("sync", shift=11)
    version = (await client.status()).committed["default"]
    told = await trainer.do("sample", prompts=[[2], [3]], max_tokens=5)
    assert told["output"]["response_ids"] == [said_after([token], 5, shift=11) for token in (2, 3)]
    assert [runs for _, _, runs in rows_of(told)] == [[[version, 5]]] * 2
    assert await trainer.call("get_weight_version") == version


async def test_what_runs_goes_on_with_new_weights(trainer: Trainer, client: RolloutClient) -> None:
    await trainer.do("sync", shift=0)
    old = (await client.status()).committed["default"]
    await trainer.do("start", prompts=[[token] for token in range(8)], max_tokens=LONG)
    await running(client, 8)
    await trainer.call("pause_generation")
    steps = [{name: each.steps for name, each in (await facts(client)).items()} for _ in range(20)]
    assert steps == [steps[0]] * 20
    await trainer.do("sync", shift=9)
    await trainer.call("resume_generation")

    told = await trainer.do("finish")
    for token, (tokens, _, runs) in enumerate(rows_of(told)):
        [[of_old, n_old], [of_new, n_new]] = runs
        assert (of_old, of_new, n_old + n_new) == (old, old + 1, LONG)
        said = said_after([token], n_old)
        assert tokens == said + said_after(said, n_new, shift=9)


async def test_what_is_aborted_returns_what_it_has(trainer: Trainer, client: RolloutClient) -> None:
    await trainer.do("sync", shift=0)
    await trainer.do("start", prompts=[[2], [3]], max_tokens=UNDER_WAY)
    await running(client, 2)
    assert await trainer.call("abort_generation") == 2
    output = (await trainer.do("finish"))["output"]
    assert output["stop_reasons"] == ["abort", "abort"]
    for token, tokens in zip((2, 3), output["response_ids"], strict=True):
        assert tokens == said_after([token], len(tokens))


async def test_memory_is_released_and_taken_back(trainer: Trainer, client: RolloutClient) -> None:
    await trainer.do("sync", shift=0)
    await trainer.call("sleep", level=1)
    for each in (await facts(client)).values():
        assert {"weights", "kv_cache"} <= set(each.asleep)
    await trainer.call("wake_up", tags=["weights"])
    await trainer.do("sync", shift=3)
    await trainer.call("wake_up")
    assert not any(each.asleep for each in (await facts(client)).values())
    told = await trainer.do("sample", prompts=[[2]], max_tokens=4)
    assert told["output"]["response_ids"] == [said_after([2], 4, shift=3)]
    await trainer.call("reset_prefix_cache", reset_running_requests=True)


async def test_an_adapter_samples_once_it_is_brought(
    trainer: Trainer, model: Path, tmp_path: Path
) -> None:
    await trainer.do("sync", shift=0)
    await check_adapter(trainer, model, tmp_path / "adapter")


async def test_dialogues_of_skyrls_generator_are_what_was_sampled(trainer: Trainer) -> None:
    await check_dialogues(trainer)


async def test_weights_by_another_way_are_refused(trainer: Trainer) -> None:
    with pytest.raises(Refusal, match="BroadcastInitInfo, which no worker of a fleet receives"):
        await trainer.do("other_sender")


@pytest.mark.parametrize(
    ("word", "value", "why"),
    [
        ("expert_parallel_size", 2, "worker w0 has ep=1"),
        ("weight_sync_backend", "ncl", "'ncl' is not one of nccl, auto"),
        ("speculative_config", {"x": 1}, "--sglang"),
        ("external_server_urls", ["http://x"], "the same"),
    ],
)
async def test_what_a_fleet_has_not_is_refused_by_name(
    trainer: Trainer, word: str, value: object, why: str
) -> None:
    place = f"generator.inference_engine.{word}"
    with pytest.raises(Refusal, match=f"SettingsError: {place}") as refused:
        await trainer.do("configured", word=place, value=value)
    assert why in str(refused.value)


@pytest.mark.parametrize(("word", "value", "changed"), WORDS.values(), ids=WORDS)
async def test_skyrls_words_are_those_of_a_fleet(
    trainer: Trainer, word: str, value: object, changed: dict[str, object]
) -> None:
    await check_word(trainer, word, value, changed)


async def test_the_page_explains_every_word_of_an_engine(trainer: Trainer) -> None:
    await check_page(trainer)


async def test_a_new_run_goes_on_where_a_killed_one_left_a_pause(
    trainer: Trainer, client: RolloutClient
) -> None:
    await trainer.do("sync", shift=0)
    await client.pause()
    await trainer.do("use_adapter", is_used=False)  # which makes the engine anew
    told = await trainer.do("sample", prompts=[[2]], max_tokens=2)
    assert told["output"]["response_ids"] == [said_after([2], 2)]


async def test_it_connects_again_after_a_teardown(trainer: Trainer) -> None:
    await trainer.call("teardown")
    await trainer.call("teardown")
    told = await trainer.do("sample", prompts=[[2]], max_tokens=2)
    assert told["output"]["response_ids"] == [said_after([2], 2)]
