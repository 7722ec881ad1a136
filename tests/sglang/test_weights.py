"""Weights on the real SGLang: each token is of the version that it says, however that one came."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
from fastapi import FastAPI

import rolloutbus
from rolloutbus import RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.bus.wire.messages.weights import InFlight, Transport
from rolloutbus.errors import RequestError
from rolloutbus.gateway.settings import GatewaySettings
from rolloutbus.gateway.sglang.labels import WeightLabels
from rolloutbus.gateway.sglang.updates import UpdatesApi
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.live_fleet import Streamed
from tests.integration.reference import Reference
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import fleet_of
from tests.sglang.models import ENDLESS, save_model
from tests.sglang.training import (
    GREEDY,
    MODES,
    N_TOKENS,
    PROMPTS,
    TEMPERATURE,
    Load,
    Trainer,
    assert_greedy_is_true,
    assert_true,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKER = "w0"
CHUNK = 128
"""Prompts longer than this are computed in several steps."""
LONG = SamplingParams(max_new_tokens=ENDLESS, temperature=TEMPERATURE, ignore_eos=True)
KINDS = ["llama", "qwen2"]
TRANSPORTS: tuple[Transport, ...] = ("shm", "tcp", "disk", "delta", "collective")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Both models; one that the seed draws in a sample."""
    options = metafunc.config.option
    kinds = KINDS if options.exhaustive else [random.Random(options.seed).choice(KINDS)]
    metafunc.parametrize("trainer", kinds, indirect=True, scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Trainer]:
    path = tmp_path_factory.mktemp("trained")
    model = save_model(request.param, path / "model")
    options = fleet_of(model, chunked_prefill_size=CHUNK)
    options["weights_dir"] = path / "versions"
    async with rolloutbus.up(**options) as fleet:
        settings = ClientSettings(name="trainer", router=fleet.address, overtime_s=DEADLINE_S)
        async with RolloutClient(settings) as client:
            publisher = WeightPublisher(client)
            yield Trainer(client, publisher, Reference(model))
            publisher.forget()


async def test_the_first_weights_are_those_of_the_checkpoint(trainer: Trainer) -> None:
    await assert_greedy_is_true(trainer, 0)
    report = await trainer.client.check_weights()
    assert report.is_ok
    assert report.by_worker[WORKER].n_tensors == len(
        dict(trainer.reference.model.named_parameters())
    )


async def posted(app: FastAPI, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and answer of an application; its caller never leaves."""
    parts = [{"type": "http.request", "body": json.dumps(body).encode()}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return parts.pop() if parts else await asyncio.Future[Any]()

    async def send(message: object) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [],
    }
    await app(scope, receive, send)
    content = b"".join(each.get("body", b"") for each in sent)
    return sent[0]["status"], json.loads(content)


@pytest.mark.shows("load_weights_from_disk", "load_format of a directory")
async def test_a_checkpoint_named_over_http_is_sampled_from(
    trainer: Trainer, tmp_path: Path
) -> None:
    app = FastAPI()
    settings = GatewaySettings(router="unused", weights_root=str(tmp_path))
    app.include_router(UpdatesApi(trainer.client, settings, WeightLabels()).router)
    before = await trainer.client.generate(PROMPTS[0], GREEDY, deadline_s=DEADLINE_S)
    trainer.seed += 1
    trainer.reference.perturb(trainer.seed, scale=0.1)
    cast("Any", trainer.reference.model).save_pretrained(tmp_path / "step", max_shard_size="200KB")

    body = {"model_path": "step", "timeout": DEADLINE_S}
    status, told = await posted(app, "/update_weights_from_disk", body)

    assert (status, told["success"]) == (200, True), told
    trainer.reference.keep(told["version"])
    await assert_greedy_is_true(trainer, told["version"])
    after = await trainer.client.generate(PROMPTS[0], GREEDY, deadline_s=DEADLINE_S)
    assert before.tokens.tolist() != after.tokens.tolist()


@pytest.mark.shows(
    "init_weight_update_communicator",
    "init_info",
    "weight_sync_backend",
    "weight_sync_backend: broadcast",
    "check_weight_sync_integrity",
    "weight_sync_method: disk",
    "custom weight loader",
)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_weights_come_by_each_transport(trainer: Trainer, transport: Transport) -> None:
    # A delta needs a version to be the difference to.
    if transport == "delta":
        await trainer.publish()
    load = Load(trainer.client)
    await load.begun()
    published = await trainer.publish(transport=transport)
    assert published.transport == {WORKER: transport}, published.why
    assert_true(trainer.reference, await load.stop())
    await assert_greedy_is_true(trainer, published.version)
    report = await trainer.client.check_weights()
    assert report.is_ok
    assert report.by_worker[WORKER].is_in_store


@pytest.mark.shows(
    "weight_version",
    "update_named_weights",
    "abort_all_requests",
    "flush_cache of an update",
    "chunked_prefill_size",
)
@pytest.mark.parametrize("in_flight", MODES)
async def test_logprobs_are_true_across_updates(trainer: Trainer, in_flight: InFlight) -> None:
    load = Load(trainer.client)
    await load.begun()
    versions = [(await trainer.publish(in_flight)).version for _ in range(3)]
    rollouts = await load.stop()

    assert_true(trainer.reference, rollouts, by_runs=in_flight == "keep")
    assert all(len(rollout.tokens) == N_TOKENS for _, rollout in rollouts)
    seen = {int(version) for _, rollout in rollouts for version in rollout.token_versions}
    assert seen & {*versions}, "no rollout met an update: the test tested nothing"
    if in_flight == "finish_old":
        assert all(len(rollout.version_runs) == 1 for _, rollout in rollouts)
    else:
        assert any(len(rollout.version_runs) > 1 for _, rollout in rollouts)
    # Nothing of what was cached under older weights is used.
    await assert_greedy_is_true(trainer, versions[-1])


@pytest.mark.parametrize("in_flight", ["keep", "retract"])
async def test_a_paused_fleet_is_updated_and_goes_on_when_told(
    trainer: Trainer, in_flight: InFlight
) -> None:
    client = trainer.client
    prompt = PROMPTS[1]
    streamed = Streamed(client, prompt, LONG, deadline_s=DEADLINE_S)
    await streamed.reached(30)
    await client.pause("in_place")
    version = (await trainer.publish(in_flight)).version
    assert await streamed.stands_still()
    await client.resume()
    await streamed.grown_by(30)
    rollout = await streamed.cut()
    assert [run for run, _ in rollout.version_runs][-1] == version
    assert len(rollout.version_runs) == 2
    assert_true(trainer.reference, [(prompt, rollout)], by_runs=in_flight == "keep")


@pytest.mark.shows("weights that do not fit")
async def test_what_does_not_fit_the_model_touches_nothing(trainer: Trainer) -> None:
    version = (await trainer.publish()).version
    named = dict(trainer.reference.model.named_parameters())
    name = "model.norm.weight"
    misfits = [
        {**named, "nonsense": named[name].clone()},
        {each: tensor for each, tensor in named.items() if each != name},
        {**named, name: named[name][:-1]},
        {**named, name: named[name].bfloat16()},
    ]
    for tensors in misfits:
        with pytest.raises(RequestError):
            await trainer.publisher.publish(tensors, require="all", deadline_s=DEADLINE_S)
        await assert_greedy_is_true(trainer, version)


@pytest.mark.shows("get_weights_by_name")
async def test_active_weights_are_fetched_by_their_names_in_the_checkpoint(
    trainer: Trainer,
) -> None:
    version = (await trainer.publish()).version
    for name, weight in trainer.reference.model.named_parameters():
        fetched = await trainer.client.get_weights(name, WORKER)
        assert fetched.version == version
        assert fetched.content.tobytes() == weight.detach().contiguous().numpy().tobytes()
