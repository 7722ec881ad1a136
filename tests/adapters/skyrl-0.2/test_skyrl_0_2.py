"""SkyRL 0.2.0's own client, generator and policy worker on a fleet, in processes of their own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from transformers import AutoTokenizer

import rolloutbus
from rolloutbus import Fleet, RolloutClient
from rolloutbus.engine_worker.engines.sglang.settings import SglangSettings
from tests.adapters.skyrl_runs import (
    DEADLINE_S,
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

pytestmark = [
    pytest.mark.adapters,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("skyrl") / "tiny"
    save_counting_model(path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    options = {"threads": 1}
    weights = tmp_path_factory.mktemp("weights")
    async with rolloutbus.up(
        model=model, workers=2, engine_options=options, weights_dir=weights
    ) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[RolloutClient]:
    async with rolloutbus.connect(fleet.address) as connected:
        yield connected


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shapes(
    fleet: Fleet, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Trainer]]:
    """SkyRL's client over an engine per worker, over one for the fleet, and the fleet itself."""
    directory = tmp_path_factory.mktemp("ranks")
    async with AsyncExitStack() as stack:
        started = [
            stack.enter_async_context(trainers("0.2", fleet, model, directory, num_engines))
            for num_engines in (2, 1, 0)
        ]
        [[each], [one], [itself]] = await asyncio.gather(*started)
        yield {"an engine per worker": each, "one engine": one, "the fleet itself": itself}


@pytest.fixture(params=["an engine per worker", "one engine", "the fleet itself"])
def trainer(shapes: dict[str, Trainer], request: pytest.FixtureRequest) -> Trainer:
    return shapes[request.param]


@pytest.fixture
def per_worker(shapes: dict[str, Trainer]) -> Trainer:
    return shapes["an engine per worker"]


async def test_a_batch_keeps_its_order(trainer: Trainer, model: Path) -> None:
    await trainer.do("sync", shift=0)
    prompts = [[40, token] for token in range(32)]
    told = await trainer.do("sample", prompts=prompts, max_tokens=6)

    output = told["output"]
    assert output["response_ids"] == [said_after(prompt, 6) for prompt in prompts]
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(model)
    assert output["responses"] == [
        tokenizer.decode(row, skip_special_tokens=True) for row in output["response_ids"]
    ]
    assert output["stop_reasons"] == ["length"] * 32
    assert np.array(output["response_logprobs"]) == pytest.approx(np.zeros((32, 6)), abs=1e-4)
    for each in told["sampled"]:  # an engine that has a worker uses no other
        assert set(each["workers"]) <= {each["engine"] or "w0", each["engine"] or "w1"}


@pytest.mark.parametrize("shape", ["an engine per worker", "the fleet itself"])
async def test_a_session_stays_where_it_began(shapes: dict[str, Trainer], shape: str) -> None:
    """Over one engine SkyRL's client tells it of no session."""
    trainer = shapes[shape]
    await trainer.do("sync", shift=0)
    prompts = [[token] for token in range(8)]
    sessions = [f"trajectory_{token}" for token in range(8)]
    places: list[dict[str, str]] = []
    for _ in range(3):
        told = await trainer.do("sample", prompts=prompts, max_tokens=4, sessions=sessions)
        answers = told["output"]["response_ids"]
        worker_of = {tuple(tokens): worker for tokens, worker, _ in rows_of(told)}
        places.append(
            {name: worker_of[tuple(said)] for name, said in zip(sessions, answers, strict=True)}
        )
        prompts = [before + said for before, said in zip(prompts, answers, strict=True)]
    assert places == [places[0]] * 3
    assert set(places[0].values()) == {"w0", "w1"}


async def test_a_pause_freezes_what_runs(trainer: Trainer, client: RolloutClient) -> None:
    await trainer.do("sync", shift=0)
    prompts = [[token] for token in range(8)]
    await trainer.do("start", prompts=prompts, max_tokens=LONG)
    await running(client, 8)
    await trainer.call("pause_generation")
    steps = [{name: each.steps for name, each in (await facts(client)).items()} for _ in range(20)]
    assert steps == [steps[0]] * 20
    assert await trainer.do("is_running")
    await trainer.call("resume_generation")

    told = await trainer.do("finish")
    assert told["output"]["response_ids"] == [said_after(prompt, LONG) for prompt in prompts]


async def test_new_weights_are_sampled_from_at_once(
    trainer: Trainer, client: RolloutClient
) -> None:
    before = (await client.status()).committed.get("default", 0)
    await trainer.do("sync", shift=17)
    told = await trainer.do("sample", prompts=[[2], [3], [4], [5]], max_tokens=5)

    wanted = [said_after([token], 5, shift=17) for token in (2, 3, 4, 5)]
    assert told["output"]["response_ids"] == wanted
    assert [runs for _, _, runs in rows_of(told)] == [[[before + 1, 5]]] * 4
    assert {each.version for each in (await client.status()).workers} == {before + 1}


async def test_weights_change_under_what_runs(trainer: Trainer, client: RolloutClient) -> None:
    """As SkyRL's asynchronous trainer does it: pause, send, go on."""
    await trainer.do("sync", shift=0)
    old = (await client.status()).committed["default"]
    await trainer.do("start", prompts=[[token] for token in range(8)], max_tokens=LONG)
    await running(client, 8)
    await trainer.call("pause_generation")
    await trainer.do("sync", shift=9)
    await trainer.call("resume_generation")

    told = await trainer.do("finish")
    rows = sorted(rows_of(told), key=lambda row: row[0])
    first = sorted(range(8), key=lambda token: said_after([token], 1))
    for token, (tokens, _, runs) in zip(first, rows, strict=True):
        [[of_old, n_old], [of_new, n_new]] = runs
        assert (of_old, of_new, n_old + n_new) == (old, old + 1, LONG)
        said = said_after([token], n_old)
        assert tokens == said + said_after(said, n_new, shift=9)


async def test_a_killed_worker_loses_and_doubles_nothing(
    trainer: Trainer, client: RolloutClient, fleet: Fleet
) -> None:
    await trainer.do("sync", shift=0)
    prompts = [[token] for token in range(8)]
    await trainer.do("start", prompts=prompts, max_tokens=LONG)
    await running(client, 8)
    fleet.kill("w0")

    told = await trainer.do("finish")
    assert told["output"]["response_ids"] == [said_after(prompt, LONG) for prompt in prompts]
    requests = [rid for each in told["sampled"] for rid in each["request_ids"]]
    assert len(set(requests)) == 8
    async with asyncio.timeout(DEADLINE_S):
        while len(await facts(client)) < 2:
            pass


async def test_two_ranks_send_what_they_hold_together(
    fleet: Fleet, client: RolloutClient, model: Path, tmp_path: Path
) -> None:
    """The model is sharded by FSDP; what one rank cannot publish, both are told."""
    async with trainers("0.2", fleet, model, tmp_path, 2, world=2) as ranks:
        await asyncio.gather(*(rank.do("sync", shift=5) for rank in ranks))
        version = (await client.status()).committed["default"]
        ends = await asyncio.gather(
            *(rank.do("sync", poison=True) for rank in ranks), return_exceptions=True
        )
        assert [type(each) for each in ends] == [Refusal, Refusal]
        assert str(ends[0]) == str(ends[1])
        assert "lm_head.weight" in str(ends[0])
        told = await ranks[0].do("sample", prompts=[[2]] * 4, max_tokens=4)
        assert told["output"]["response_ids"] == [said_after([2], 4, shift=5)] * 4
        assert [runs for _, _, runs in rows_of(told)] == [[[version, 4]]] * 4

        await asyncio.gather(*(rank.do("sync", shift=6) for rank in ranks))
        told = await ranks[0].do("sample", prompts=[[2]] * 4, max_tokens=4)
        assert told["output"]["response_ids"] == [said_after([2], 4, shift=6)] * 4


async def test_dialogues_of_skyrls_generator_are_what_was_sampled(trainer: Trainer) -> None:
    await check_dialogues(trainer)


async def test_an_adapter_samples_once_it_is_brought(
    trainer: Trainer, model: Path, tmp_path: Path
) -> None:
    await trainer.do("sync", shift=0)
    await check_adapter(trainer, model, tmp_path / "adapter")


async def test_openais_requests_are_answered(trainer: Trainer, model: Path) -> None:
    await trainer.do("sync", shift=0)
    name = str(model)
    asked = {"model": name, "prompt": [[token] for token in range(6)], "max_tokens": 3}
    more = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    answer = await trainer.call("completion", request_payload={"json": {**asked, **more}})
    assert [each["index"] for each in answer["choices"]] == [*range(6)]
    assert [each["token_ids"] for each in answer["choices"]] == [
        said_after([token], 3) for token in range(6)
    ]
    assert answer["usage"]["completion_tokens"] == 18

    messages = [{"role": "user", "content": "hello"}]
    chat = {"model": name, "messages": messages, "max_tokens": 3, "session_id": 7}
    answer = await trainer.call("chat_completion", request_payload={"json": chat})
    assert answer["choices"][0]["message"]["role"] == "assistant"

    wrong = {"json": {**asked, "max_tokns": 3}}
    answer = await trainer.call("completion", request_payload=wrong)
    assert (answer["error"]["code"], "max_tokns" in answer["error"]["message"]) == (400, True)


async def test_skyrls_http_endpoint_answers(per_worker: Trainer, model: Path) -> None:
    await per_worker.do("sync", shift=0)
    body = {"model": str(model), "prompt": [2], "max_tokens": 3, "ignore_eos": True}
    asked = {**body, "return_token_ids": True, "session_id": "a"}
    status, answer = await per_worker.do("endpoint", path="/v1/completions", body=asked)
    assert (status, answer["choices"][0]["token_ids"]) == (200, said_after([2], 3))
    wrong = {**body, "temperature": -1.0}
    status, answer = await per_worker.do("endpoint", path="/v1/completions", body=wrong)
    assert (status, "temperature" in answer["error"]["message"]) == (400, True)


async def test_memory_is_released_and_taken_back(trainer: Trainer, client: RolloutClient) -> None:
    await trainer.do("sync", shift=0)
    await trainer.call("sleep")
    for each in (await facts(client)).values():
        assert {"weights", "kv_cache"} <= set(each.asleep)
    await trainer.call("wake_up", tags=["weights"])
    await trainer.do("sync", shift=3)
    await trainer.call("wake_up")
    assert not any(each.asleep for each in (await facts(client)).values())
    told = await trainer.do("sample", prompts=[[2]], max_tokens=4)
    assert told["output"]["response_ids"] == [said_after([2], 4, shift=3)]
    await trainer.call("reset_prefix_cache")


@pytest.mark.parametrize(
    ("word", "way"),
    [
        ("auto", "shm"),
        ("shm", "shm"),
        ("tcp", "tcp"),
        ("delta", "delta"),
        ("disk", "disk"),
        ("gloo", "collective"),
    ],
)
async def test_weights_come_by_the_way_that_is_said(
    per_worker: Trainer, word: str, way: str
) -> None:
    await per_worker.do("sync", shift=0)
    assert await per_worker.do("sync", shift=3, by=word) == {"w0": way, "w1": way}
    told = await per_worker.do("sample", prompts=[[2]] * 4, max_tokens=4)
    assert told["output"]["response_ids"] == [said_after([2], 4, shift=3)] * 4


async def test_weights_by_another_way_are_refused(per_worker: Trainer) -> None:
    with pytest.raises(Refusal, match="BroadcastInitInfo, which no worker of a fleet receives"):
        await per_worker.do("other_sender")


@pytest.mark.parametrize(
    ("word", "value", "why"),
    [
        ("num_engines", 3, "the fleet has 2 workers"),
        ("tensor_parallel_size", 2, "worker w0 has tp=1"),
        ("weight_sync_backend", "ncl", "'ncl' is not one of nccl, auto"),
        ("backend", "sglang", "keep 'vllm'"),
        ("run_engines_locally", False, "FleetEngines"),
        ("remote_urls", ["127.0.0.1:1"], "FleetOptions.address"),
        ("async_engine", False, "asynchronous"),
        ("engine_init_kwargs", {"x": 1}, "--sglang.NAME VALUE"),
        ("enable_return_routed_experts", True, "gateway"),
        ("external_proxy_url", "http://x", "RemoteInferenceClient"),
        ("enable_pd", True, "prefill and decode"),
    ],
)
async def test_what_a_fleet_has_not_is_refused_by_name(
    per_worker: Trainer, word: str, value: object, why: str
) -> None:
    place = f"generator.inference_engine.{word}"
    with pytest.raises(Refusal, match=f"SettingsError: {place}") as refused:
        await per_worker.do("configured", word=place, value=value)
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"n": 2}, "n_samples_per_prompt"),
        ({"logprobs": 5}, "0 or 1"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"max_tokens": None}, "max_tokens"),
    ],
)
async def test_parameters_that_cannot_be_had_are_refused_by_name(
    per_worker: Trainer, changed: dict[str, object], why: str
) -> None:
    batch = {"prompt_token_ids": [[2]], "sampling_params": {"max_tokens": 2, **changed}}
    with pytest.raises(Refusal, match="Refused") as refused:
        await per_worker.call("generate", input_batch=batch)
    assert why in str(refused.value)


async def test_a_fleet_can_begin_with_skyrls_words(per_worker: Trainer) -> None:
    options = await per_worker.do("options")
    assert (options["workers"], options["engine"]) == (2, "sglang")
    engine = msgspec.convert(options["engine_options"] | {"model": "x"}, SglangSettings)
    assert (engine.slots, engine.dtype, engine.text) == (1024, "float32", True)
    assert engine.arguments["mem_fraction_static"] == 0.8
    assert engine.arguments["max_prefill_tokens"] == 8192


@pytest.mark.parametrize(("word", "value", "changed"), WORDS.values(), ids=WORDS)
async def test_skyrls_words_are_those_of_a_fleet(
    per_worker: Trainer, word: str, value: object, changed: dict[str, object]
) -> None:
    await check_word(per_worker, word, value, changed)


async def test_the_page_explains_every_word_of_an_engine(per_worker: Trainer) -> None:
    await check_page(per_worker)
