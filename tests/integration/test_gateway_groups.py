"""Weights that a trainer broadcasts over its own group: one version for the fleet, or none."""

# pyright: reportUnknownVariableType=false
# The stubs of safetensors leave parameters untyped.

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from rolloutbus import Fleet, RolloutClient, SamplingParams
from rolloutbus.bus.wire.errors import PeerLost
from rolloutbus.launcher.settings import UpOptions
from rolloutbus.trainer_adapter.joined_group.incoming import IncomingWeights
from rolloutbus.trainer_adapter.joined_group.orders import Bucket, Invitation, PublishRules
from tests.integration.gateway_process import Gateway, Json, Reply, gateway
from tests.integration.live_fleet import DEADLINE_S, START_S, STEADY_HOST, Streamed
from tests.integration.trained_model import GREEDY, Trained, greedy, tensors_of, trained
from tests.integration.trainer_group import JOIN, LEAVE, RECEIVE, Trainer, joined, rank_0

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

FLEET: UpOptions = {
    "workers": 2,
    "engine_options": {"threads": 1, "slots": 8},
    "host": STEADY_HOST,
}
LONG = SamplingParams(max_new_tokens=20_000, temperature=0, ignore_eos=True)
CONFLICT = 409
MIB = 1 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(fleet: Fleet) -> AsyncIterator[Gateway]:
    async with gateway("--address", fleet.address) as running:
        yield running


@dataclass(frozen=True)
class Step:
    """What training made of the model."""

    model: Trained
    file: Path
    tensors: dict[str, torch.Tensor]

    def part(self, start: int, end: int | None = None) -> dict[str, torch.Tensor]:
        return dict([*self.tensors.items()][start:end])


@pytest.fixture
def step(tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Step:
    """Another one for each test."""
    item: pytest.Item = cast("Any", request).node  # it has no type
    model = trained(tiny_model, crc32(item.name.encode()))
    tensors = tensors_of(model)
    save_file(tensors, tmp_path / "step.safetensors")
    return Step(model, tmp_path / "step.safetensors", tensors)


async def says(client: RolloutClient, version: int) -> list[int]:
    wanted = f"exact:{version}"
    rollout = await client.generate([5, 6], GREEDY, versions=wanted, deadline_s=DEADLINE_S)
    assert rollout.version_runs == [(version, GREEDY.max_new_tokens)]
    return rollout.tokens.tolist()


async def versions(client: RolloutClient) -> dict[str, int]:
    return {each.name: each.version for each in (await client.status()).workers}


async def test_buckets_become_one_version_of_all_workers(
    served: Gateway, client: RolloutClient, step: Step
) -> None:
    before = await versions(client)
    async with joined(served) as trainer:
        # After the trainer's start, which takes seconds.
        running = Streamed(client, [5, 6], LONG, deadline_s=START_S)
        await running.reached(1)
        assert (await served.ask("POST", "/pause_generation", {"mode": "in_place"})).status == 200
        assert (await served.ask("POST", "/flush_cache")).status == 200
        n_in = 0
        while n_in + 5 < len(step.tensors):
            reply, told = await trainer.send(served, step.file, step.part(n_in, n_in + 5))
            assert told["problem"] == ""
            n_in += 5
            assert reply.json["n_tensors"] == n_in
            assert reply.json["version"] is None
            assert "nothing is published yet" in reply.json["message"]
            assert await versions(client) == before
        last, _ = await trainer.send(served, step.file, step.part(n_in))
        assert (await served.ask("POST", "/continue_generation", {})).status == 200

    await running.grown_by(1)
    runs = (await running.cut()).version_runs
    assert [version for version, _ in runs] == [before[running.worker], last.json["version"]]
    assert (last.status, last.json["success"]) == (200, True), last.json
    assert last.json["n_tensors"] == last.json["n_expected"] == len(step.tensors)
    assert set((await versions(client)).values()) == {last.json["version"]}
    assert await says(client, last.json["version"]) == greedy(step.model, [5, 6])


async def test_packed_bucket_brings_a_version_that_the_trainer_has_a_name_for(
    served: Gateway, client: RolloutClient, step: Step
) -> None:
    before = max((await versions(client)).values())
    asked: Json = {"load_format": "flattened_bucket", "flush_cache": False}
    async with joined(served) as trainer:
        reply, _ = await trainer.send(
            served, step.file, step.tensors, **asked, weight_version="step7"
        )
    assert (reply.status, reply.json["version"]) == (200, before + 1), reply.json
    assert await says(client, before + 1) == greedy(step.model, [5, 6])
    named = await served.ask("GET", "/get_weight_version")
    assert named.json["weight_version"] == "step7"


async def test_incomplete_version_is_named_when_generation_is_to_go_on(
    served: Gateway, client: RolloutClient, step: Step
) -> None:
    before = await versions(client)
    absent = [*step.tensors][-1]
    await served.ask("POST", "/pause_generation", {"mode": "in_place"})
    async with joined(served) as trainer:
        await trainer.send(served, step.file, step.part(0, -1))
        for path in ("/continue_generation", "/resume"):
            early = await served.ask("POST", path, {})
            assert early.status == CONFLICT
            assert f"missing: {absent!r}" in early.json["error"]["message"]
            assert (await served.ask("GET", "/is_paused")).json["is_paused"]

        gone = await served.ask("POST", LEAVE, {"group_name": trainer.group})
        assert f"given up: {len(step.tensors) - 1} of" in gone.json["message"]
    assert (await served.ask("POST", "/continue_generation", {})).status == 200
    assert await versions(client) == before


def refused(reply: Reply) -> tuple[int, str]:
    """Status, and the field that is named."""
    assert reply.json["success"] is False
    assert reply.json["message"] == reply.json["error"]["message"]
    return reply.status, reply.json["error"]["param"]


async def test_trainer_that_dies_while_it_sends_leaves_the_old_version(
    served: Gateway, client: RolloutClient, step: Step
) -> None:
    before = await versions(client)
    await served.ask("POST", "/pause_generation", {"mode": "in_place"})
    async with joined(served, "doomed") as trainer:
        await trainer.send(served, step.file, step.part(0, 4))
        trainer.order(step.file, [*step.part(4)], then="die")
        broken = await served.ask("POST", RECEIVE, trainer.bucket(step.part(4)))
        assert broken.status == 503, broken.json
        assert "group 'doomed' is over" in broken.json["message"]
        told = await served.ask("POST", "/continue_generation", {})
        assert told.status == CONFLICT
        assert "4 of" in told.json["error"]["message"]

        async with rank_0("doomed") as next_one:  # it takes the place of the dead one
            join = await served.ask("POST", JOIN, next_one.invitation())
            assert join.status == 200, join.json
            assert (await served.ask("POST", "/continue_generation", {})).status == 200
            assert await versions(client) == before
            await next_one.said()
            reply, _ = await next_one.send(served, step.file, step.tensors)
            assert reply.json["version"], reply.json
    assert await says(client, reply.json["version"]) == greedy(step.model, [5, 6])


async def test_trainer_that_stalls_is_given_up_at_the_deadline(
    served: Gateway, client: RolloutClient, step: Step
) -> None:
    before = await versions(client)
    async with joined(served) as trainer:
        trainer.order(step.file, [*step.tensors], then="stall")
        body = trainer.bucket(step.tensors) | {"timeout": 2}
        reply = await served.ask("POST", RECEIVE, body)
        assert reply.status == 504
        assert "did not come within 2 s" in reply.json["message"]
    assert await versions(client) == before


@pytest.mark.shows("destroy_group")
async def test_group_is_over_when_it_is_destroyed_while_it_receives(
    served: Gateway, step: Step
) -> None:
    async with joined(served) as trainer:
        trainer.order(step.file, [*step.tensors], then="stall")
        receiving = asyncio.create_task(served.ask("POST", RECEIVE, trainer.bucket(step.tensors)))
        assert (await trainer.said())["stalled"]
        assert (await served.ask("POST", LEAVE, {"group_name": trainer.group})).status == 200
        reply = await receiving
        assert reply.status == 503
        assert "it was destroyed" in reply.json["message"]
        unknown = await served.ask("POST", RECEIVE, trainer.bucket(step.tensors))
        assert refused(unknown) == (400, "group_name")


async def test_tensors_that_are_not_the_models_are_refused_and_the_group_goes_on(
    served: Gateway, client: RolloutClient, step: Step, tmp_path: Path
) -> None:
    name, right = next(iter(step.tensors.items()))
    async with joined(served) as trainer:
        for wrong, why in (
            ({"nonsense": right}, "no such tensor"),
            ({name: right.reshape(-1)}, f"the fleet's is F32 {list(right.shape)}"),
            ({name: right.to(torch.bfloat16)}, f"the fleet's is F32 {list(right.shape)}"),
        ):
            save_file(wrong, tmp_path / "wrong.safetensors")
            reply, told = await trainer.send(served, tmp_path / "wrong.safetensors", wrong)
            assert refused(reply) == (400, f"tensors.{next(iter(wrong))}")
            assert why in reply.json["message"]
            assert told["problem"] == ""
            assert (await served.ask("POST", "/continue_generation", {})).status == 200
        await trainer.send(served, step.file, {name: right})
        twice, _ = await trainer.send(served, step.file, {name: right})
        assert refused(twice) == (400, f"tensors.{name}")
        second, *_ = rest = step.part(1)
        spoilt = rest | {second: torch.full_like(rest[second], torch.inf)}
        save_file(spoilt, tmp_path / "spoilt.safetensors")
        unsound, _ = await trainer.send(served, tmp_path / "spoilt.safetensors", spoilt)
        assert refused(unsound) == (400, f"tensors.{second}")
        reply, _ = await trainer.send(
            served, step.file, step.tensors
        )  # nothing is left of the other one
        assert reply.json["version"], reply.json
    assert await says(client, reply.json["version"]) == greedy(step.model, [5, 6])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"flush_cash": True}, "flush_cash"),
        ({"load_format": "gguf"}, "load_format"),
        ({"dtypes": ["float32"]}, "dtypes"),
        ({"weight_version": ""}, "weight_version"),
        ({"is_async": True}, "is_async"),
        ({"names": []}, "names"),
    ],
)
async def test_bucket_that_cannot_be_received_ends_the_group(
    served: Gateway, step: Step, fields: Json, param: str
) -> None:
    async with joined(served) as trainer:
        reply, told = await trainer.send(served, step.file, step.tensors, **fields)
        assert refused(reply) == (400, param)
        assert told["problem"], "rank 0 waits for nobody"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RECEIVE, b'{"names": ['),
        (RECEIVE, b"[" + b" " * (64 * MIB)),
        ("/update_weights", b'{"update_info": []}'),
        ("/update_weights", b'{"update_info": '),
        ("/collective_rpc", b'{"method": "update_weights_nccl", "kwargs": []}'),
        ("/collective_rpc", b'{"method": "update_weights_nccl", "kwargs": {'),
        ("/collective_rpc", b"[" + b" " * (64 * MIB)),
    ],
    ids=[
        *("no json", "too large", "no object of SkyRL's", "no json of SkyRL's"),
        *("no object called", "no json called", "too large called"),
    ],
)
async def test_bucket_that_cannot_be_read_ends_the_only_group(
    served: Gateway, step: Step, path: str, body: bytes
) -> None:
    async with joined(served, "pp_0") as trainer:
        trainer.order(step.file, [*step.tensors])
        reply = await served.ask("POST", path, body)
        assert reply.status == (413 if len(body) > MIB else 400)
        async with asyncio.timeout(DEADLINE_S):
            assert (await trainer.said())["problem"], "rank 0 waits for nobody"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"method": "reload"}, "method"),
        ({"method": ["update_weights_nccl"]}, "method"),
        ({"method": "skyrl_start_weight_update", "kwargs": []}, "kwargs"),
        ({"method": "skyrl_finish_weight_update", "kwargs": {"timeout": 0}}, "timeout"),
    ],
)
async def test_call_that_brings_no_bucket_is_refused_and_the_group_goes_on(
    served: Gateway, step: Step, body: Json, param: str
) -> None:
    async with joined(served) as trainer:
        called = await served.ask("POST", "/collective_rpc", body)
        assert (called.status, called.json["error"]["param"]) == (400, param)
        reply, told = await trainer.send(served, step.file, step.part(0, 1))
        assert (reply.status, told["problem"]) == (200, "")


async def test_bucket_that_cannot_be_read_ends_no_group_of_several(
    served: Gateway, step: Step
) -> None:
    async with joined(served, "pp_0") as first, joined(served, "pp_1"):
        assert (await served.ask("POST", RECEIVE, b"[")).status == 400
        reply, told = await first.send(served, step.file, step.part(0, 1))
        assert (reply.status, told["problem"]) == (200, "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"rank_offset": 2}, "rank_offset"),
        ({"rank_offset": 0}, "rank_offset"),
        ({"backend": "nccl"}, "backend"),
        ({"backend": "mpi"}, "backend"),
        ({"master_address": "8.8.8.8"}, "master_address"),
        ({"master_address": "::ffff:8.8.8.8"}, "master_address"),
        ({"master_address": "169.254.169.254"}, "master_address"),
        ({"master_address": "nobody.invalid"}, "master_address"),
        ({"master_port": 0}, "master_port"),
        ({"policy": "absent"}, None),
        ({"groupname": "a"}, "groupname"),
    ],
)
async def test_invitation_that_cannot_be_followed_is_refused_by_name(
    served: Gateway, fields: Json, param: str | None
) -> None:
    body: Json = {"master_address": "127.0.0.1", "master_port": 9, "backend": "gloo"}
    reply = await served.ask("POST", JOIN, body | {"rank_offset": 1, "world_size": 2} | fields)
    assert reply.json["error"]["param"] == param, reply.json
    assert reply.status == (503 if "policy" in fields else 400)


async def test_second_group_of_a_name_is_refused(served: Gateway) -> None:
    async with joined(served) as trainer:
        reply = await served.ask("POST", JOIN, trainer.invitation())
        assert refused(reply) == (400, "group_name")
        assert "destroy it first" in reply.json["message"]


async def test_world_that_counts_workers_is_told_that_the_fleet_is_one_rank(
    served: Gateway,
) -> None:
    async with rank_0("wide", world=3) as trainer:
        reply = await served.ask("POST", JOIN, trainer.invitation(world_size=3, timeout=8))
        assert reply.status == 504
        assert "The whole fleet is one rank there, 1" in reply.json["message"]
        again = await served.ask("POST", LEAVE, {"group_name": "wide"})
        assert refused(again) == (400, "group_name")


async def test_pipeline_stages_bring_one_version_over_their_groups(
    served: Gateway, client: RolloutClient, step: Step
) -> None:
    before = await versions(client)
    async with joined(served, "stage0") as first, joined(served, "stage1") as second:
        half, _ = await first.send(served, step.file, step.part(0, 7))
        assert half.json["version"] is None
        assert await versions(client) == before
        whole, _ = await second.send(served, step.file, step.part(7))
        assert whole.json["n_tensors"] == len(step.tensors)
    assert await says(client, whole.json["version"]) == greedy(step.model, [5, 6])


async def test_trainers_that_join_a_new_gateway_at_once_are_both_in(fleet: Fleet) -> None:
    async with (
        gateway("--address", fleet.address) as fresh,
        rank_0("one") as one,
        rank_0("two") as two,
    ):
        asks = [fresh.ask("POST", JOIN, each.invitation()) for each in (one, two)]
        assert [each.status for each in await asyncio.gather(*asks)] == [200, 200]
        for name in ("one", "two"):
            left = await fresh.ask("POST", LEAVE, {"group_name": name})
            assert left.status == 200, left.json


async def test_bucket_whose_asker_leaves_before_its_turn_ends_the_group(
    client: RolloutClient,
) -> None:
    incoming, forms = IncomingWeights(client), await client.list_weights()
    rules = PublishRules("keep")
    async with rank_0("left") as trainer:
        invitation = Invitation("left", "127.0.0.1", trainer.port, 1, 2, "gloo", START_S)
        await incoming.join(invitation, "default", forms)
        first, second = (
            asyncio.create_task(incoming.receive("left", Bucket([form]), rules, START_S))
            for form in forms[:2]
        )
        for _ in range(10):  # turns of the loop: the second one waits for its own then
            await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(PeerLost, match="went away before its turn"):
            await first  # or the next one would take the bytes of the second
        await incoming.close()


async def test_gateway_that_dies_leaves_its_place_in_the_group(fleet: Fleet, step: Step) -> None:
    async with gateway("--address", fleet.address) as mortal, rank_0() as trainer:
        assert (await mortal.ask("POST", JOIN, trainer.invitation())).status == 200
        await trainer.said()
        mortal.process.kill()
        await mortal.process.wait()
        trainer.order(step.file, [*step.tensors] * 50)
        assert (await trainer.said())["problem"]


class TestSkyRL:
    """Start, tensors, finish; as its remote client says it, and as vLLM does."""

    @pytest.mark.parametrize("dialect", ["vllm", "skyrl"])
    async def test_finish_publishes_what_came_since_the_start(
        self, served: Gateway, client: RolloutClient, step: Step, dialect: str
    ) -> None:
        before = await versions(client)
        async with rank_0() as trainer:
            await join(served, trainer)
            for packed, tensors in ((True, step.part(0, 9)), (False, step.part(9))):
                if packed:
                    assert (await ask(served, dialect, "start", {})).status == 200
                trainer.order(step.file, [*tensors], packed=packed)
                info = info_of(trainer.bucket(tensors)) | {"packed": packed}
                reply = await ask(served, dialect, "update", {"update_info": info})
                assert reply.status == 200, reply.json
                await trainer.said()
            assert await versions(client) == before
            reply = await ask(served, dialect, "finish", {})
            await served.ask("POST", LEAVE, {})
        assert reply.status == 200, reply.json
        told = reply.json["results"][0] if dialect == "skyrl" else reply.json
        assert await says(client, told["version"]) == greedy(step.model, [5, 6])

    async def test_finish_names_what_did_not_come_and_gives_it_up(
        self, served: Gateway, client: RolloutClient, step: Step
    ) -> None:
        before = await versions(client)
        async with rank_0() as trainer:
            await join(served, trainer)
            assert (await served.ask("POST", "/start_weight_update", {})).status == 200
            assert (await served.ask("POST", "/start_weight_update", {})).status == CONFLICT
            trainer.order(step.file, [*step.part(1)])
            info = info_of(trainer.bucket(step.part(1)))
            await served.ask("POST", "/update_weights", {"update_info": info})
            await trainer.said()
            reply = await served.ask("POST", "/finish_weight_update", {})
            assert reply.status == 400
            assert f"missing: {next(iter(step.tensors))!r}" in reply.json["error"]["message"]
            again = await served.ask("POST", "/finish_weight_update", {})
            assert "was started" in again.json["error"]["message"]
            await served.ask("POST", LEAVE, {})
        assert await versions(client) == before

    async def test_update_whose_trainer_dies_is_given_up_with_its_group(
        self, served: Gateway
    ) -> None:
        async with rank_0() as trainer:
            await join(served, trainer)
            assert (await served.ask("POST", "/start_weight_update", {})).status == 200
        assert (await served.ask("POST", "/resume")).status == CONFLICT
        gone = await served.ask("POST", LEAVE, {})
        assert "given up" in gone.json["message"]
        assert (await served.ask("POST", "/resume")).status == 200
        assert (await served.ask("POST", "/finish_weight_update", {})).status == 400

    async def test_senders_of_vllm_are_refused_with_what_works(self, served: Gateway) -> None:
        info: Json = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1}
        body = {"init_info": info | {"world_size": 2}}
        reply = await served.ask("POST", "/init_weight_transfer_engine", body)
        assert reply.status == 400
        assert reply.json["error"]["param"] == "init_info.backend"
        assert "can be received without vLLM" in reply.json["error"]["message"]
        for method in ("update_weights_ipc", "reload"):
            called = await served.ask("POST", "/collective_rpc", {"method": method})
            assert (called.status, called.json["error"]["param"]) == (400, "method")


METHODS = {
    "start": "skyrl_start_weight_update",
    "update": "update_weights_nccl",
    "finish": "skyrl_finish_weight_update",
}
PATHS = {
    "start": "/start_weight_update",
    "update": "/update_weights",
    "finish": "/finish_weight_update",
}


async def join(served: Gateway, trainer: Trainer) -> None:
    body = trainer.invitation()
    del body["group_name"]
    reply = await served.ask("POST", "/init_weight_transfer_engine", {"init_info": body})
    assert reply.status == 200, reply.json
    await trainer.said()


async def ask(served: Gateway, dialect: str, what: str, body: Json) -> Reply:
    if dialect == "vllm":
        return await served.ask("POST", PATHS[what], body)
    return await served.ask("POST", "/collective_rpc", {"method": METHODS[what], "kwargs": body})


def info_of(bucket: Json) -> Json:
    """What vLLM calls a bucket."""
    return {
        "names": bucket["names"],
        "dtype_names": bucket["dtypes"],
        "shapes": bucket["shapes"],
    }
