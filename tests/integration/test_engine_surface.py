"""A client asks for scores, vectors, adapters and files: what it sends, and what it makes of it.

Router and workers are played by the test; which engine can do what is tested elsewhere.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest
import xxhash

from rolloutbus import Grammar, Media, Processor, RolloutClient, SamplingParams, Want, connect_sync
from rolloutbus.bus.actor.ref import FLEET
from rolloutbus.bus.wire.codec import array_of, pack, unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import EngineFailed, Refused, RemoteProtocolError, SettingsError
from rolloutbus.bus.wire.messages.control import (
    Adapters,
    Embed,
    Embedded,
    FleetOutcome,
    FlushCache,
    Flushed,
    GetLoad,
    Load,
    LoadLora,
    Profiled,
    Rerank,
    Reranked,
    Saved,
    SaveWeights,
    Score,
    Scored,
    ServerFacts,
    StartProfile,
    StopProfile,
    UnloadLora,
    WorkerOutcome,
)
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.generation import Array, Generate, Generated
from rolloutbus.bus.wire.messages.membership import Lease, Member, Welcome
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.integration.live_fleet import DEADLINE_S
from tests.integration.pretend_router import PretendRouter

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

BULK = "tcp://127.0.0.1:7005"
UNSUPPORTED = Problem("unsupported", "This worker's engine cannot do it.", "not_started")


def floats(*shape: int) -> Array:
    return array_of(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))


ANSWERS: dict[str, msgspec.Struct] = {
    "score": Scored(floats(2, 3), 9),
    "embed": Embedded(floats(2, 4), 9),
    "rerank": Reranked(floats(2)),
    "load_lora": Adapters({"judge": 3}),
    "unload_lora": Adapters({}),
    "save_weights": Saved("/out/a", ["model.safetensors"], 10),
    "start_profile": Done(),
    "stop_profile": Profiled(["profile-1/trace.json"]),
    "get_load": Load({"usage": 0.25}),
    "flush_cache": Flushed(7),
}


class PretendFleet:
    """Answers every command; keeps what was asked, and of whom."""

    def __init__(self, folder: Path) -> None:
        self._router = PretendRouter(folder, self._answers)
        self.address = self._router.address
        self.asked: list[tuple[str, msgspec.Struct]] = []
        """(route, body)."""
        self.answers = dict(ANSWERS)
        self.arrays: dict[str, Array] = {}
        states = [("w0", "ready", "default"), ("w1", "asleep", "default")]
        states += [("w2", "ready", "default"), ("e0", "ready", "embedder")]
        self.members = [
            Member(name, "b.1", f"ipc://{folder}/{name}", state, 0, policy)
            for name, state, policy in states
        ]

    def close(self) -> None:
        self._router.close()

    def _answers(self, entry: Entry) -> list[Entry]:
        match entry.kind:
            case "hello":
                return [Entry("welcome", body=pack(Welcome(1, "r", 1, self.members, BULK)))]
            case "client_beat":
                return [Entry("lease", body=pack(Lease(1, "r", 1)))]
            case "generate":
                self.asked.append((entry.route, unpack(entry)))
                body = pack(self._generated(cast("Generate", unpack(entry))))
                return [Entry("finished", entry.rid, (1, 1), route="w0", body=body)]
            case kind if kind in self.answers:
                self.asked.append((entry.route, unpack(entry)))
                return [Entry("finished", entry.rid, body=pack(self._outcome(kind, entry.route)))]
            case _:
                return []

    def _outcome(self, kind: str, route: str) -> FleetOutcome:
        answer = self.answers[kind]
        ending = "failed" if isinstance(answer, Problem) else "finished"
        names = ["w0", "w2"] if route == FLEET else [route.removeprefix("worker:")]
        return FleetOutcome([WorkerOutcome(name, ending, pack(answer)) for name in names], [])

    def _generated(self, body: Generate) -> Generated:
        tokens = np.arange(body.sampling.max_new_tokens, dtype="<i4").tobytes()
        return Generated(
            tokens=tokens,
            logprobs=bytes(len(tokens)),
            versions=[(0, body.sampling.max_new_tokens)],
            finish_reason="length",
            digest=xxhash.xxh3_64_intdigest(tokens),
            n_prompt_tokens=len(body.prompt) // 4,
            arrays=self.arrays,
        )


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[PretendFleet]:
    fleet = PretendFleet(tmp_path)
    yield fleet
    fleet.close()


@pytest.fixture
async def client(fleet: PretendFleet) -> AsyncIterator[RolloutClient]:
    settings = ClientSettings("c", fleet.address, connect_timeout_s=DEADLINE_S)
    async with RolloutClient(settings) as client:
        yield client


def ints(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


async def test_scores_come_as_a_table(fleet: PretendFleet, client: RolloutClient) -> None:
    found = await client.score([1, 2], [[3], [4, 5]], [7], apply_softmax=False, item_first=True)
    assert found.scores.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found.n_prompt_tokens == 9
    sent = Score(ints(1, 2), [ints(3), ints(4, 5)], [7], apply_softmax=False, item_first=True)
    assert fleet.asked[0][1] == sent


async def test_scores_need_no_query(fleet: PretendFleet, client: RolloutClient) -> None:
    await client.score([], [[3]])
    assert fleet.asked[0][1] == Score(b"", [ints(3)], [])


async def test_embeddings_come_as_a_table_and_their_cosine_as_a_number(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    found = await client.embed([[1], [2, 3]], dimensions=4, policy="embedder")
    assert found.rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert fleet.asked == [("worker:e0", Embed([ints(1), ints(2, 3)], 4))]
    fleet.answers["embed"] = Embedded(array_of(np.array([[3, 4], [-4, 3]], np.float32)), 2)
    assert await client.compute_similarity([1], [2], worker="e0") == pytest.approx(0.0)
    fleet.answers["embed"] = Embedded(array_of(np.array([[3, 4], [6, 8]], np.float32)), 2)
    assert await client.compute_similarity([1], [2], worker="e0") == pytest.approx(1.0)
    fleet.answers["embed"] = Embedded(array_of(np.zeros((2, 2), np.float32)), 2)
    assert await client.compute_similarity([1], [2], worker="e0") == 0.0


async def test_ranks_come_as_a_row(fleet: PretendFleet, client: RolloutClient) -> None:
    assert (await client.rerank([("a", "b"), ("a", "c")])).tolist() == [0, 1]
    assert fleet.asked[0][1] == Rerank([("a", "b"), ("a", "c")])


async def test_ready_workers_of_the_policy_take_turns(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    for _ in range(4):
        await client.score([1], [[3]])
    assert sorted(route for route, _ in fleet.asked) == ["worker:w0"] * 2 + ["worker:w2"] * 2


def told(*, tp: int) -> ServerFacts:
    return ServerFacts("sglang", 0, "ready", 0, 0, 0, 0, 64, 4096, 8, {"tp": tp, "pp": 1})


async def test_facts_of_a_worker_are_asked_for_once_and_those_of_several_must_be_alike(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    for worker, tp in (("w0", 2), ("w1", 2), ("w2", 4)):
        fleet.answers["server_info"] = told(tp=tp)
        facts = await client.facts(worker)
        assert (facts.tp_size, facts.pp_size, facts.ep_size) == (tp, 1, 1)
    asked = len(fleet.asked)
    assert (await client.facts("w2")).tp_size == 4
    with pytest.raises(SettingsError, match="differ in tp_size: w0 has 2, w2 4; ask one"):
        await client.facts()
    assert len(fleet.asked) == asked


async def test_where_nobody_is_ready_nothing_is_sent(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    with pytest.raises(Refused) as caught:
        await client.score([1], [[3]], policy="other")
    assert caught.value.code == "not_ready"
    assert fleet.asked == []


async def test_what_an_engine_cannot_do_is_raised(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    fleet.answers["score"] = fleet.answers["save_weights"] = UNSUPPORTED
    for call in (client.score([1], [[3]]), client.save_weights("disk", "a", worker="w0")):
        with pytest.raises(EngineFailed) as caught:
            await call
        assert (caught.value.code, caught.value.outcome) == ("unsupported", "not_started")


async def test_scores_of_another_shape_or_type_are_a_fault_of_the_peer(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    for wrong in (floats(6), Array("int32", (2, 3), bytes(24)), Array("float32", (9, 9), b"")):
        fleet.answers["score"] = Scored(wrong, 9)
        with pytest.raises(RemoteProtocolError):
            await client.score([1], [[3]])


async def test_adapters_are_loaded_everywhere_or_on_one_worker(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    result = await client.load_lora("judge", 3, path="adapters/judge")
    assert dict(result.by_worker) == dict.fromkeys(("w0", "w2"), Adapters({"judge": 3}))
    await client.load_lora("judge", 4, target="w0")
    await client.unload_lora("judge")
    assert fleet.asked == [
        ("fleet", LoadLora("judge", 3, "adapters/judge")),
        ("worker:w0", LoadLora("judge", 4, "", BULK)),
        ("fleet", UnloadLora("judge")),
    ]


async def test_weights_profiles_gauges_and_caches_of_workers(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    saved = await client.save_weights("disk", "a", worker="w0", kind="sharded")
    assert saved == ANSWERS["save_weights"]
    await client.start_profile(n_steps=3, activities=["CPU"], target="w0")
    assert (await client.stop_profile()).by_worker["w2"] == ANSWERS["stop_profile"]
    assert (await client.get_load(target="w0")).only(Load) == ANSWERS["get_load"]
    assert (await client.flush_cache(["device", "host"], target="w0")).only(Flushed).n_tokens == 7
    await client.flush_cache()
    assert fleet.asked == [
        ("worker:w0", SaveWeights("disk", "a", "sharded")),
        ("worker:w0", StartProfile(3, ["CPU"])),
        ("fleet", StopProfile()),
        ("worker:w0", GetLoad()),
        ("worker:w0", FlushCache(["device", "host"])),
        ("fleet", FlushCache()),
    ]


async def test_what_is_wanted_goes_along_and_its_arrays_come_back(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    bits = np.array([[0x3F80, 0x4000]], np.uint16)
    fleet.arrays = {"hidden_states": array_of(bits, "bfloat16"), "top_token_ids": floats(3, 2)}
    rollout = await client.generate(
        [1, 2],
        SamplingParams(max_new_tokens=3, stop=["."], logit_bias={5: -1.0}),
        lora="judge@3",
        want=Want(hidden_states="last"),
        grammar=Grammar("regex", "a+"),
        processors=(Processor("mask", {"ids": [1]}),),
        media=(Media("image", b"x"),),
    )
    assert rollout.arrays["hidden_states"].tolist() == [[1.0, 2.0]]
    assert rollout.arrays["hidden_states"].dtype == np.float32
    assert rollout.arrays["top_token_ids"].shape == (3, 2)
    sent = fleet.asked[0][1]
    assert isinstance(sent, Generate)
    assert (sent.lora, sent.want.hidden_states) == ("judge@3", "last")
    assert (sent.grammar, sent.media) == (Grammar("regex", "a+"), [Media("image", b"x")])
    assert sent.processors == [Processor("mask", {"ids": [1]})]
    assert (sent.sampling.stop, sent.sampling.logit_bias) == (["."], {5: -1.0})


async def test_every_sample_of_a_batch_has_the_same_wishes(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    await client.generate_batch([[1], [2]], SamplingParams(3), n=2, lora="judge", want=Want(1))
    bodies = [cast("Generate", body) for _, body in fleet.asked]
    assert [(body.lora, body.want.top_logprobs) for body in bodies] == [("judge", 1)] * 4


async def test_a_plain_request_is_as_small_as_ever(
    fleet: PretendFleet, client: RolloutClient
) -> None:
    rollout = await client.generate([1], SamplingParams(3))
    assert rollout.arrays == {}
    plain = msgspec.msgpack.decode(pack(fleet.asked[0][1]))
    assert set(plain) == {"prompt", "sampling"}


def test_a_blocking_client_has_the_same_names(tmp_path: Path) -> None:
    public = {name for name in dir(RolloutClient) if not name.startswith("_")}
    sync = {name for name in dir(type(connect_sync(f"ipc://{tmp_path}/r"))) if name[0] != "_"}
    assert public - sync <= {"bulk", "connection", "dialer", "ref", "sessions"}
