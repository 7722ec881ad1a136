"""SGLang's endpoints for weights and adapters: all of a fleet has a version, or keeps its own."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import save

from rolloutbus import Fleet, RolloutClient, SamplingParams, WeightPublisher, up
from rolloutbus.bus.wire.messages.control import ServerFacts
from rolloutbus.launcher.settings import UpOptions
from tests.integration.gateway_process import Gateway, Json, Reply, gateway
from tests.integration.live_fleet import (
    DEADLINE_S,
    ENDLESS,
    PATIENT,
    START_S,
    STEADY_HOST,
    Streamed,
    another_worker,
)
from tests.integration.trained_model import GREEDY, greedy, tensors_of, trained
from tests.lora_adapters import random_lora

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {
    "workers": 2,
    "engine_options": {"threads": 1, "slots": 8},
    "lease": PATIENT,
    "host": STEADY_HOST,
}
LONG = SamplingParams(max_new_tokens=ENDLESS, temperature=0, ignore_eos=True)
OCTETS = {"content-type": "application/octet-stream"}
NAME = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the operator lets the gateway read."""
    return tmp_path_factory.mktemp("weights_root")


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the workers' operator lets them read."""
    return tmp_path_factory.mktemp("versions")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tiny_model: Path, versions: Path) -> AsyncIterator[Fleet]:
    options: UpOptions = {**FLEET, "model": tiny_model, "weights_dir": versions}
    async with up(**options) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(fleet: Fleet, root: Path) -> AsyncIterator[Gateway]:
    async with gateway("--address", fleet.address, "--weights-root", str(root)) as running:
        yield running


async def samples(client: RolloutClient, version: int) -> list[int]:
    wanted = f"exact:{version}"
    rollout = await client.generate([5, 6], GREEDY, versions=wanted, deadline_s=DEADLINE_S)
    return rollout.tokens.tolist()


def told(reply: Reply) -> str:
    """Why it was refused, by the field that it names."""
    assert reply.json["success"] is False
    assert reply.json["message"] == reply.json["error"]["message"]
    return reply.json["error"]["param"]


async def test_checkpoint_in_several_files_becomes_the_fleets_weights(
    served: Gateway, client: RolloutClient, root: Path, tiny_model: Path
) -> None:
    model = trained(tiny_model, 1)
    model.save_pretrained(root / "step1", max_shard_size="200KB")
    assert len(list((root / "step1").glob("*.safetensors"))) > 1

    reply = await served.ask("POST", "/update_weights_from_disk", {"model_path": "step1"})

    assert (reply.status, reply.json["success"]) == (200, True), reply.json
    assert reply.json["workers"] == ["w0", "w1"]
    assert await samples(client, reply.json["version"]) == greedy(model, [5, 6])
    status = await client.status()
    assert {each.version for each in status.workers} == {reply.json["version"]}


async def test_tensors_in_a_body_become_the_fleets_weights(
    served: Gateway, client: RolloutClient, tiny_model: Path
) -> None:
    model = trained(tiny_model, 2)
    path = "/update_weights_from_tensor"
    body = save(tensors_of(model))
    raw = await served.ask("POST", f"{path}?flush_cache=false&timeout=60", body, OCTETS)
    assert (raw.status, raw.json["success"]) == (200, True), raw.json
    assert await samples(client, raw.json["version"]) == greedy(model, [5, 6])

    encoded = {"safetensors": base64.b64encode(body).decode(), "abort_all_requests": True}
    again = await served.ask("POST", path, encoded)
    assert again.json["version"] == raw.json["version"] + 1


async def test_body_larger_than_the_model_is_not_read(served: Gateway, tiny_model: Path) -> None:
    largest = (tiny_model / "model.safetensors").stat().st_size + 100_000_000
    path = "/update_weights_from_tensor"
    reader, writer = await served.open("POST", path, b"", largest + 1, OCTETS)
    async with asyncio.timeout(DEADLINE_S):
        assert b" 413 " in await reader.readline()
    writer.close()


async def test_first_values_of_a_tensor_are_told_as_sglang_tells_them(
    served: Gateway, client: RolloutClient, tiny_model: Path
) -> None:
    model = trained(tiny_model, 3)
    version = (await WeightPublisher(client).publish(model, require="all")).version
    wanted = model.get_parameter(NAME).detach()[:3]

    reply = await served.ask("POST", "/get_weights_by_name", {"name": NAME, "truncate_size": 3})

    assert torch.equal(torch.tensor(reply.json), wanted)
    assert reply.headers["x-smg-weight-version"] == str(version)
    absent = await served.ask("POST", "/get_weights_by_name", {"name": "nonsense"})
    assert absent.status >= 400
    assert "nonsense" in absent.json["error"]["message"]


async def test_weights_are_checked_with_the_store(served: Gateway, client: RolloutClient) -> None:
    await client.status()
    for body in ({}, {"action": "checksum"}, {"action": "compare"}):
        reply = await served.ask("POST", "/weights_checker", body)
        assert (reply.status, reply.json["success"]) == (200, True), reply.json
        assert set(reply.json["workers"]) == {"w0", "w1"}
        assert len(reply.json["per_engine_checksum"]) == 64
    refused = await served.ask("POST", "/weights_checker", {"action": "snapshot"})
    assert (refused.status, told(refused)) == (400, "action")


async def test_weights_that_do_not_fit_leave_every_worker_where_it_was(
    served: Gateway, client: RolloutClient, tiny_model: Path
) -> None:
    before = {each.name: each.version for each in (await client.status()).workers}
    partial = {NAME: tensors_of(trained(tiny_model, 4))[NAME]}

    reply = await served.ask("POST", "/update_weights_from_tensor", save(partial), OCTETS)

    assert reply.status == 500
    assert reply.json["success"] is False
    assert "w0" in reply.json["message"]
    assert {each.name: each.version for each in (await client.status()).workers} == before


async def test_second_publisher_is_a_conflict(
    served: Gateway, client: RolloutClient, tiny_model: Path
) -> None:
    model = trained(tiny_model, 5)
    running = Streamed(client, [5, 6], LONG, deadline_s=START_S)
    await running.reached(1)
    first = WeightPublisher(client).start(model, in_flight="finish_old")
    async for progress in first.changes():
        if progress.phase in ("preparing", "recording", "committing"):
            break
    body = save(tensors_of(model))

    asked = await served.ask("POST", "/update_weights_from_tensor?timeout=2", body, OCTETS)

    assert asked.json["error"]["code"] == "update_in_progress", asked.json
    assert asked.status == 409
    await running.cut()
    assert (await first).quarantined == {}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("disk", {}, "body"),
        ("disk", {"model_path": "/etc"}, "model_path"),
        ("disk", {"model_path": "../step1"}, "model_path"),
        ("disk", {"model_path": "away"}, "model_path"),
        ("disk", {"model_path": "absent"}, "model_path"),
        ("disk", {"model_path": "broken"}, "model_path"),
        ("disk", {"model_path": "other"}, "model_path"),
        ("disk", {"model_path": "step1", "weight_version": ""}, "weight_version"),
        ("disk", {"model_path": "step1", "is_async": True}, "is_async"),
        ("disk", {"model_path": "step1", "keep_pause": True}, "keep_pause"),
        ("disk", {"model_path": "step1", "load_format": "gguf"}, "load_format"),
        ("disk", {"model_path": "step1", "flush_cash": True}, "flush_cash"),
        ("disk", {"model_path": "step1", "timeout": 0}, "timeout"),
        ("tensor", {"serialized_named_tensors": ["gASV"]}, "serialized_named_tensors"),
        ("tensor", {"safetensors": "AAAA"}, "safetensors"),
        ("tensor", {"safetensors": 7}, "safetensors"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(
    served: Gateway, root: Path, path: str, body: Json, param: str | None
) -> None:
    (root / "broken").mkdir(exist_ok=True)
    (root / "broken" / "model.safetensors").write_bytes(b"\x80\x04pickled")
    (root / "other").mkdir(exist_ok=True)
    (root / "other" / "a.safetensors").write_bytes(save({"a": torch.ones(1)}))
    index = {"weight_map": {"a": "a.safetensors", "b": "a.safetensors"}}
    (root / "other" / "model.safetensors.index.json").write_text(json.dumps(index))
    if not (root / "away").is_symlink():
        (root / "away").symlink_to("/tmp")  # noqa: S108 - leads outside of the root
    reply = await served.ask("POST", f"/update_weights_from_{path}", body)
    assert (reply.status, told(reply)) == (400, param), reply.json


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("", "safetensors"),
        ("?timeout=abc", "timeout"),
        ("?timeout=inf", "timeout"),
        ("?timeout=nan", "timeout"),
        ("?flush_cache=maybe", "flush_cache"),
        ("?weight_version=", "weight_version"),
        ("?flush_cash=true", "flush_cash"),
    ],
)
async def test_fields_in_the_url_are_read_as_strictly(
    served: Gateway, query: str, param: str
) -> None:
    reply = await served.ask("POST", f"/update_weights_from_tensor{query}", b"\x07", OCTETS)
    assert (reply.status, told(reply)) == (400, param), reply.json


async def test_gateway_without_a_weights_root_reads_no_files(fleet: Fleet, root: Path) -> None:
    async with gateway("--address", fleet.address) as running:
        body = {"model_path": str(root / "step1")}
        reply = await running.ask("POST", "/update_weights_from_disk", body)
    assert (reply.status, told(reply)) == (400, "model_path")
    assert "--weights-root" in reply.json["message"]


async def test_adapter_is_loaded_on_all_workers_and_forgotten(
    served: Gateway, client: RolloutClient, versions: Path, tiny_model: Path
) -> None:
    random_lora(trained(tiny_model, 6), 1).save(versions / "adapters" / "math")
    body = {"lora_name": "math", "lora_path": str(versions / "adapters" / "math")}

    loaded = (await served.ask("POST", "/load_lora_adapter", body)).json

    assert (loaded["success"], set(loaded["workers"])) == (True, {"w0", "w1"})
    assert await adapters(client) == {"w0": {"math"}, "w1": {"math"}}
    for path in ("/load_lora_adapter", "/v1/load_lora_adapter"):
        again = await served.ask("POST", path, body)
        assert (again.status, again.json["error"]["param"]) == (400, "lora_name")
    replaced = await served.ask("POST", "/skyrl/v1/load_lora_adapter", body)
    assert (replaced.status, set(replaced.json["workers"])) == (200, {"w0", "w1"})
    pinned = await served.ask("POST", "/load_lora_adapter", {**body, "pinned": True})
    assert (pinned.status, pinned.json["error"]["param"]) == (400, "pinned")
    assert (await served.ask("POST", "/unload_lora_adapter", {"lora_name": "math"})).status == 200
    assert await adapters(client) == {"w0": set(), "w1": set()}


async def test_adapter_is_a_model_by_its_name_alone(
    served: Gateway, client: RolloutClient, tiny_model: Path
) -> None:
    lora = random_lora(trained(tiny_model, 6), 3)
    publisher = WeightPublisher(client)
    step = await publisher.publish_lora("agent-3", lora.tensors, alpha=lora.alpha)
    wanted = await client.generate([5, 6], GREEDY, lora="agent-3", deadline_s=DEADLINE_S)
    sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}

    async def sampled(model: str) -> Reply:
        body = {"token_ids": [5, 6], "sampling_params": sampling, "model": model}
        return await served.ask("POST", "/inference/v1/generate", body)

    for name in ("agent-3", f"agent-3@{step.version}", "agent@3"):
        assert (await sampled(name)).json["choices"][0]["token_ids"] == wanted.tokens.tolist()
        assert (await served.ask("GET", f"/v1/models/{name}")).json["id"] == name
    for name in ("agent@2", "agent"):
        assert (await sampled(name)).status == 404
        assert (await served.ask("GET", f"/v1/models/{name}")).status == 404
    await client.unload_lora("agent-3")


async def test_adapter_that_one_worker_cannot_load_is_kept_by_none(
    served: Gateway, fleet: Fleet, client: RolloutClient, versions: Path, tiny_model: Path
) -> None:
    random_lora(trained(tiny_model, 6), 2).save(versions / "adapters" / "code")
    options = {"model": str(tiny_model), "threads": 1, "slots": 8}
    async with another_worker(fleet, client, "blind", engine_options=options):
        body = {"lora_name": "code", "lora_path": "adapters/code"}
        for path in ("/load_lora_adapter", "/skyrl/v1/load_lora_adapter"):
            reply = await served.ask("POST", path, body)
            assert reply.status == 400
            assert "blind" in reply.json["error"]["message"]
            assert await adapters(client) == {"w0": set(), "w1": set(), "blind": set()}


async def adapters(client: RolloutClient) -> dict[str, set[str]]:
    """What each worker has loaded."""
    facts = (await client.server_info()).by_worker
    return {
        name: set(each.adapters) for name, each in facts.items() if isinstance(each, ServerFacts)
    }


async def test_load_of_each_worker_and_how_workers_join(served: Gateway) -> None:
    whole, short = await asyncio.gather(
        served.ask("GET", "/v1/loads"), served.ask("GET", "/get_load")
    )
    assert [row["worker"] for row in whole.json["loads"]] == ["w0", "w1"]
    assert [row["num_reqs"] for row in short.json] == [0, 0]
    refused = await served.ask("POST", "/add_worker?url=http://127.0.0.1:1", {})
    assert (refused.status, refused.json["error"]["param"]) == (400, "url")
