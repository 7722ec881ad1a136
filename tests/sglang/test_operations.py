"""Files, profiles, gauges and caches of the real SGLang, as its operator uses them."""

import asyncio
import gzip
import importlib.metadata
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import pytest_asyncio
import torch
import transformers
from safetensors.torch import load

from rolloutbus import Fleet, RolloutClient, SamplingParams, WeightPublisher
from rolloutbus.bus.wire.messages.control import (
    CacheTier,
    Flushed,
    Load,
    PauseMode,
    Profiled,
    ServerFacts,
)
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.engine_worker.engines.sglang.rendezvous import settled_ports
from rolloutbus.errors import Refused, RequestError
from rolloutbus.launcher.fleet import children_of
from tests.integration.live_fleet import DEADLINE_S, PACE_S, Streamed
from tests.integration.reference import Reference
from tests.sglang.models import ENDLESS, SLOTS
from tests.sglang.processes import listening_ports, scheduler_pids
from tests.sglang.redis_server import EXECUTABLE

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5, 6, 7, 8, 9]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=ENDLESS, ignore_eos=True)
WATCHED_S = 2.0
"""How long processes are watched; what they cost while starved for a core is only less."""
IDLE_SHARE = 0.05
"""Of one core."""


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def everything_goes_on(operated: RolloutClient) -> AsyncIterator[None]:
    """After each test the engine of the fleet works, and it is still the same one."""
    before = [worker.epoch for worker in (await operated.status()).workers]
    yield
    await operated.abort()
    await operated.resume(check=False)
    await operated.generate(PROMPT, GREEDY, deadline_s=DEADLINE_S)
    status = await operated.status()
    assert [worker.epoch for worker in status.workers] == before
    assert status.troubled == {}


def _unfused(reference: Reference) -> list[tuple[str, torch.Tensor]]:
    """Those that SGLang does not join with others."""
    joined = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    named = reference.model.named_parameters()
    return [(name, tensor.data) for name, tensor in named if not any(j in name for j in joined)]


def error_in(result: Any) -> RequestError:  # noqa: ANN401 - a FleetResult
    told = result.by_worker["w0"]
    assert isinstance(told, RequestError), told
    return told


@pytest.mark.shows("save to a directory")
async def test_saved_weights_are_those_that_were_published_last(
    operated: RolloutClient, llama: Path
) -> None:
    reference = Reference(llama)
    reference.perturb(seed=11)
    await WeightPublisher(operated).publish(reference.model.named_parameters(), require="all")

    saved = await operated.save_weights("models", "whole", worker="w0")

    loaders = cast("Any", transformers.AutoModelForCausalLM)
    loaded = loaders.from_pretrained(saved.path, dtype=torch.float32)
    expected = dict(reference.model.named_parameters())
    assert {name for name, _ in loaded.named_parameters()} == set(expected)
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, expected[name]), name
    assert {"config.json", "tokenizer.json"} <= set(saved.files)


@pytest.mark.shows("save_sharded_model")
async def test_weights_are_saved_as_the_ranks_hold_them(operated: RolloutClient) -> None:
    saved = await operated.save_weights("models", "sharded", worker="w0", kind="sharded")

    assert "model-rank-0-part-0.safetensors" in saved.files
    assert "config.json" in saved.files
    assert saved.size_bytes > 0


async def test_a_place_that_cannot_be_written_to_is_told_and_harms_nothing(
    operated: RolloutClient,
) -> None:
    with pytest.raises(RequestError, match=r"127\.0\.0\.1:1\b") as told:
        await operated.save_weights("nowhere", "x", worker="w0", kind="remote")
    assert told.value.outcome == "failed"


@pytest.mark.shows("save_remote_model")
@pytest.mark.skipif(not EXECUTABLE.exists(), reason="there is no Redis for this Python")
async def test_weights_are_saved_to_a_store_of_tensors(
    operated: RolloutClient, llama: Path, redis_port: int
) -> None:
    redis = pytest.importorskip("redis")
    reference = Reference(llama)
    reference.perturb(seed=12)
    await WeightPublisher(operated).publish(reference.model.named_parameters(), require="all")

    saved = await operated.save_weights("redis", "one", worker="w0", kind="remote")

    assert saved.path == f"redis://127.0.0.1:{redis_port}/run/one"
    with redis.Redis(port=redis_port) as store:
        assert json.loads(store.get("run/one/files/config.json"))["model_type"] == "llama"
        for name, tensor in _unfused(reference):
            (found,) = load(store.get(f"run/one/keys/rank_0/{name}")).values()
            assert torch.equal(found, tensor), name


@pytest.mark.shows("start_profile", "stop_profile")
async def test_a_profile_shows_what_the_scheduler_did(
    operated: RolloutClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert isinstance((await operated.start_profile()).only(Done), Done)
    assert error_in(await operated.start_profile(check=False)).code == "busy"
    await operated.generate(PROMPT, GREEDY, deadline_s=DEADLINE_S)

    (file,) = (await operated.stop_profile()).only(Profiled).files

    trace = tmp_path_factory.getbasetemp() / "operated0" / "profiles" / file
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("name", "").startswith("aten::") for event in events)
    assert error_in(await operated.stop_profile(check=False)).code == "busy"


@pytest.mark.shows("start_profile.num_steps")
async def test_a_profile_of_some_steps_stops_by_itself(operated: RolloutClient) -> None:
    await operated.start_profile(n_steps=2)
    await operated.generate(PROMPT, GREEDY, deadline_s=DEADLINE_S)

    assert len((await operated.stop_profile()).only(Profiled).files) == 1


@pytest.mark.parametrize("activities", [["MEM"], ["RPD"]])
async def test_what_no_engine_profiles_is_refused_at_the_call(
    operated: RolloutClient,
    activities: Any,  # noqa: ANN401
) -> None:
    with pytest.raises(Refused) as refused:
        await operated.start_profile(activities=activities)
    assert (refused.value.code, refused.value.field) == ("bad_request", "activities")


@pytest.mark.parametrize("activities", [["GPU"], []])
async def test_what_cannot_be_profiled_here_is_refused(
    operated: RolloutClient, activities: list[Literal["CPU", "GPU"]]
) -> None:
    told = error_in(await operated.start_profile(activities=activities, check=False))

    assert told.code == "bad_request"
    assert "activities" in str(told)
    assert error_in(await operated.stop_profile(check=False)).code == "busy"


@pytest.mark.shows("get_loads", "max_num_seqs")
async def test_gauges_are_those_of_the_engine(operated: RolloutClient) -> None:
    before = (await operated.get_load()).only(Load).gauges
    assert before["max_running_requests"] == SLOTS

    await operated.generate([*range(50, 90)], GREEDY, deadline_s=DEADLINE_S)

    told, after = "total_prefill_uncached_tokens", before
    async with asyncio.timeout(DEADLINE_S):
        while after[told] == before[told]:  # its snapshot comes later, and nobody tells when
            await asyncio.sleep(PACE_S)
            after = (await operated.get_load()).only(Load).gauges
    assert after[told] > before[told]


@pytest.mark.shows("get_server_info")
async def test_an_engine_says_what_it_is(operated: RolloutClient) -> None:
    facts = (await operated.server_info()).only(ServerFacts)

    assert facts.engine == "sglang"
    assert facts.parallel == {"tp": 1, "pp": 1, "dp": 1, "ep": 1}
    assert facts.software["sglang"] == importlib.metadata.version("sglang")
    assert facts.software["torch"] == importlib.metadata.version("torch")


@pytest.mark.shows("reset_prefix_cache", "flush the GPU's tier")
async def test_a_flush_tells_how_much_it_forgot(operated: RolloutClient) -> None:
    await operated.flush_cache()
    prompt = [*range(100, 140)]
    await operated.generate(prompt, GREEDY, deadline_s=DEADLINE_S)

    assert (await operated.flush_cache()).only(Flushed).n_tokens >= len(prompt)
    assert (await operated.flush_cache()).only(Flushed).n_tokens == 0


@pytest.mark.parametrize("tier", ["host", "storage"])
async def test_a_tier_that_is_not_there_is_refused(
    operated: RolloutClient, tier: CacheTier
) -> None:
    told = error_in(await operated.flush_cache(["device", tier], check=False))

    assert told.code == "unsupported"
    assert "enable_hierarchical_cache" in str(told)


@pytest.mark.parametrize("mode", [None, "in_place"])
async def test_a_flush_beside_requests_is_refused_and_they_go_on(
    operated: RolloutClient, mode: PauseMode | None
) -> None:
    streamed = Streamed(operated, PROMPT, LONG)
    await streamed.reached(10)
    if mode is not None:
        await operated.pause(mode)

    assert error_in(await operated.flush_cache(check=False)).code == "busy"

    await operated.resume()
    await streamed.grown_by(10)


@pytest.mark.parametrize("mode", [None, "in_place", "abort"])
async def test_an_engine_that_has_nothing_to_do_leaves_the_cores_alone(
    fleet: Fleet, client: RolloutClient, mode: PauseMode | None
) -> None:
    await client.generate(PROMPT, GREEDY, deadline_s=DEADLINE_S)
    if mode is not None:
        await client.pause(mode)
    pids = [*fleet.host_pids("w0"), *scheduler_pids(fleet)]
    pids += [child for pid in fleet.host_pids("w0") for child in children_of(pid)]

    await leave_the_cores_alone(pids)
    await client.resume()


async def test_a_held_request_keeps_no_core_busy(fleet: Fleet, client: RolloutClient) -> None:
    for mode in ("in_place", "retract"):
        streamed = Streamed(client, PROMPT, LONG)
        await streamed.reached(10)
        await client.pause(mode)
        assert await streamed.stands_still()

        await leave_the_cores_alone(scheduler_pids(fleet))

        await client.resume()
        await streamed.grown_by(10)
        await streamed.cut()


async def test_schedulers_meet_where_no_other_engine_does(fleet: Fleet) -> None:
    (pid,) = scheduler_pids(fleet)

    assert listening_ports(pid) & set(settled_ports())


async def leave_the_cores_alone(pids: list[int]) -> None:
    """Wait until they do; a moment ago they may have had something to do."""
    async with asyncio.timeout(DEADLINE_S):
        spent = WATCHED_S
        while spent >= IDLE_SHARE * WATCHED_S:
            before = cpu_seconds(pids)
            await asyncio.sleep(WATCHED_S)  # what is measured is this time
            spent = cpu_seconds(pids) - before


def cpu_seconds(pids: list[int]) -> float:
    """CPU time that these processes have had."""
    ticks = 0
    for pid in set(pids):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
