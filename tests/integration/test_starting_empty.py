"""A fleet that starts without weights, and gets them from a trainer or from a directory."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# The stubs of safetensors and transformers leave parameters untyped.

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

import rolloutbus
from rolloutbus import Fleet, RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.errors import Refused, SettingsError
from rolloutbus.trainer_adapter.publisher.checkpoint import INDEX
from tests.integration.live_fleet import DEADLINE_S, START_S, UNHURRIED, status_when, worker_in
from tests.integration.reference import Reference

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(480),
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def bare(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tiny model without its weights."""
    path = tmp_path_factory.mktemp("bare")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(tiny_model / name, path)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(bare: Path) -> AsyncIterator[Fleet]:
    options = {"threads": 1, "load_format": "dummy"}
    async with rolloutbus.up(
        model=bare, workers=2, engine_options=options, lease=UNHURRIED
    ) as running:
        yield running


async def sample(client: RolloutClient, worker: str) -> rolloutbus.Rollout:
    return await client.generate(PROMPT, GREEDY, worker=worker, deadline_s=DEADLINE_S)


async def test_all_workers_make_up_the_same_weights(client: RolloutClient) -> None:
    first, second = [await sample(client, worker) for worker in ("w0", "w1")]
    assert first.token_versions.tolist() == second.token_versions.tolist() == 6 * [0]
    assert first.tokens.tolist() == second.tokens.tolist()


@pytest.mark.shows("load_format: dummy")
async def test_a_trainer_brings_the_first_weights(
    fleet: Fleet, client: RolloutClient, tiny_model: Path
) -> None:
    reference = Reference(tiny_model)
    with torch.no_grad():  # also where the made-up ones are no zeros
        reference.model.get_parameter("model.layers.0.self_attn.o_proj.weight").zero_()
    publisher = WeightPublisher(client)
    published = await publisher.publish(reference.model, require="all", deadline_s=DEADLINE_S)
    reference.keep(published.version)
    assert (await client.check_weights()).is_ok
    before = worker_in(await client.status(), "w1")
    assert before is not None
    fleet.kill("w1")  # its next engine begins empty, too
    await status_when(
        client,
        lambda status: (
            (now := worker_in(status, "w1")) is not None
            and now.pid != before.pid
            and now.version == published.version
        ),
        START_S,
    )
    for worker in ("w0", "w1"):
        rollout = await sample(client, worker)
        assert rollout.tokens.tolist() == reference.likeliest(PROMPT, rollout)
        np.testing.assert_allclose(
            rollout.logprobs, reference.fresh(PROMPT, rollout, 1.0), atol=1e-5
        )


def as_snapshot(model: Path, into: Path) -> Path:
    """The model's weights in two files with an index, each a link, as a hub cache has them."""
    blobs, snapshot = into / "blobs", into / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    tensors = load_file(model / "model.safetensors")
    weight_map = {name: f"model-{n % 2}.safetensors" for n, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        part = {name: each for name, each in tensors.items() if weight_map[name] == file}
        save_file(part, blobs / file)
        (snapshot / file).symlink_to(blobs / file)
    (snapshot / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return snapshot


@pytest.mark.shows("load_weights_from_disk", "hub snapshots")
async def test_the_snapshot_of_a_hub_cache_is_published(
    client: RolloutClient, tiny_model: Path, tmp_path: Path
) -> None:
    snapshot = as_snapshot(tiny_model, tmp_path)
    publisher = WeightPublisher(client)
    published = await publisher.publish(snapshot, require="all", deadline_s=DEADLINE_S)
    reference = Reference(tiny_model)
    reference.keep(published.version)
    assert (await client.check_weights()).is_ok
    rollout = await sample(client, "w1")
    assert rollout.tokens.tolist() == reference.likeliest(PROMPT, rollout)


@pytest.mark.shows("load_format of a directory")
async def test_a_directory_that_lacks_what_its_index_names_is_refused(
    client: RolloutClient, tiny_model: Path, tmp_path: Path
) -> None:
    snapshot = as_snapshot(tiny_model, tmp_path)
    (snapshot / "model-1.safetensors").unlink()
    with pytest.raises(Refused, match=r"model-1.safetensors cannot be read") as refused:
        await WeightPublisher(client).publish(snapshot, deadline_s=DEADLINE_S)
    assert refused.value.field == "tensors"


async def test_a_directory_without_weights_says_how_to_start_empty(bare: Path) -> None:
    with pytest.raises(SettingsError, match="load_format='dummy' in engine_options"):
        rolloutbus.up(model=bare)
