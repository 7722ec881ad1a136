"""Control commands meet the fake engine: results, capabilities, typed failures."""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
import xxhash

from rolloutbus.bus.weights.manifest import Bytes
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.control import (
    FlushCache,
    Flushed,
    Memory,
    Pause,
    Resume,
    Sleep,
    WakeUp,
)
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.weights import (
    AbortUpdate,
    CheckedWeights,
    CheckWeights,
    Committed,
    CommitUpdate,
    GetWeights,
    GotWeights,
    ListedWeights,
    ListWeights,
    Prepared,
    PrepareUpdate,
    TensorCheck,
    TensorForm,
)
from rolloutbus.engine_worker.engine import Step, TensorRange, TensorSpec
from rolloutbus.engine_worker.engines.fake.engine import FAKE_SPECS, FakeEngine
from rolloutbus.engine_worker.engines.fake.settings import FakeSettings
from rolloutbus.engine_worker.host.commands import HostCommands
from rolloutbus.engine_worker.weights.active import PIECE_BYTES, ActiveWeights
from rolloutbus.engine_worker.worker.controller import HOST_COMMANDS


def ignore(_: Step) -> None:
    """Nobody reads the tokens."""


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(FakeSettings(), ignore)
    yield engine
    engine.close()


@pytest.fixture
def commands(engine: FakeEngine) -> HostCommands:
    return HostCommands(engine, 5.0)


async def do(commands: HostCommands, kind: str, body: msgspec.Struct) -> tuple[str, msgspec.Struct]:
    return await commands.carry_out(Entry(kind, "c/1", body=pack(body)))


async def test_engine_can_do_what_it_has_parts_for_and_no_more(commands: HostCommands) -> None:
    beyond = {"score", "embed", "rerank", "load_lora", "unload_lora", "save_weights", "get_load"}
    assert set(commands.capabilities) == HOST_COMMANDS - beyond - {"start_profile", "stop_profile"}


async def test_pause_and_resume_are_idempotent(commands: HostCommands) -> None:
    for _ in range(2):
        assert await do(commands, "pause", Pause("in_place")) == ("finished", Done())
    for _ in range(2):
        assert await do(commands, "resume", Resume()) == ("finished", Done())


async def test_memory_tags_add_up(commands: HostCommands) -> None:
    _, first = await do(commands, "sleep", Sleep(["kv_cache"]))
    _, second = await do(commands, "sleep", Sleep(["weights"]))
    _, third = await do(commands, "wake_up", WakeUp(["kv_cache"]))
    asleep = [body.asleep for body in (first, second, third) if isinstance(body, Memory)]
    assert asleep == [["kv_cache"], ["kv_cache", "weights"], ["weights"]]


async def test_flush_returns_a_count(commands: HostCommands) -> None:
    assert await do(commands, "flush_cache", FlushCache()) == ("finished", Flushed(0))


async def test_a_cache_tier_that_is_not_there_is_refused_and_says_what_brings_it(
    commands: HostCommands,
) -> None:
    kind, problem = await do(commands, "flush_cache", FlushCache(["device", "storage"]))
    assert kind == "failed"
    assert isinstance(problem, Problem)
    assert (problem.code, problem.outcome, problem.field) == ("unsupported", "not_started", "tiers")
    assert "hicache_storage_backend" in problem.message


async def test_update_to_what_is_active_needs_nothing(commands: HostCommands) -> None:
    prepare = PrepareUpdate("default", 0, "ipc:///nowhere")
    assert await do(commands, "prepare_update", prepare) == ("finished", Prepared(0, 0, "", 0.0))
    commit = CommitUpdate("default", 0, "keep")
    assert await do(commands, "commit_update", commit) == ("finished", Committed(0, 0.0))


async def test_commit_without_prepare_fails_with_a_hint(commands: HostCommands) -> None:
    kind, body = await do(commands, "commit_update", CommitUpdate("default", 3, "keep"))
    assert kind == "failed"
    assert isinstance(body, Problem)
    assert (body.code, body.outcome) == ("update_failed", "not_started")


async def test_abort_of_an_update_that_was_never_prepared_is_fine(commands: HostCommands) -> None:
    assert await do(commands, "abort_update", AbortUpdate("default", 9)) == ("finished", Done())


async def test_check_tells_the_digest_of_what_is_active(commands: HostCommands) -> None:
    kind, checked = await do(commands, "check_weights", CheckWeights())
    assert kind == "finished"
    assert isinstance(checked, CheckedWeights)
    assert checked.version == 0
    assert checked.tensors == [
        TensorCheck(spec.name, xxhash.xxh3_64_intdigest(bytes(spec.size_bytes)), 0, is_zero=True)
        for spec in FAKE_SPECS
    ]


async def test_check_sees_one_wrong_byte_and_every_number_that_is_not_finite(
    engine: FakeEngine, commands: HostCommands
) -> None:
    wrong = np.array([np.inf, 1.0, np.nan], np.float32).view(np.uint8)
    engine.overwriter.overwrite("head.weight", 4, wrong)
    _, checked = await do(commands, "check_weights", CheckWeights(["head.weight"]))
    assert isinstance(checked, CheckedWeights)
    digest = xxhash.xxh3_64_intdigest(bytes(4) + wrong.tobytes())
    assert checked.tensors == [TensorCheck("head.weight", digest, 2, is_zero=False)]


async def test_get_brings_a_range_of_a_tensor(engine: FakeEngine, commands: HostCommands) -> None:
    engine.overwriter.overwrite("head.weight", 0, np.arange(16, dtype=np.uint8))
    found = await do(commands, "get_weights", GetWeights("head.weight", 4, 3))
    assert found == ("finished", GotWeights(0, "F32", (4,), 4, b"\x04\x05\x06"))


async def test_list_tells_what_the_engine_takes(commands: HostCommands) -> None:
    forms = [TensorForm(spec.name, spec.dtype, spec.shape) for spec in FAKE_SPECS]
    listed = await do(commands, "list_weights", ListWeights())
    assert listed == ("finished", ListedWeights(forms))


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        ("check_weights", CheckWeights(["nonsense"]), "names"),
        ("get_weights", GetWeights("nonsense", 0, 1), "name"),
        ("get_weights", GetWeights("head.weight", 10, 7), "offset"),
    ],
)
async def test_what_is_not_there_is_named(
    commands: HostCommands, kind: str, body: msgspec.Struct, field: str
) -> None:
    ended, problem = await do(commands, kind, body)
    assert ended == "failed"
    assert isinstance(problem, Problem)
    assert (problem.code, problem.field) == ("bad_request", field)


class ChangesMidway:
    """A large tensor; after the second piece of it another version becomes active, `n` times."""

    def __init__(self, n: int) -> None:
        self.spec = TensorSpec("w", "U8", (3 * PIECE_BYTES,), 3 * PIECE_BYTES)
        self._version, self._n_left, self._n_pieces = 1, n, 0

    def read_ranges(self, ranges: Sequence[TensorRange]) -> tuple[int, list[Bytes]]:
        found = [np.full(each.size_bytes, self._version, np.uint8) for each in ranges]
        version = self._version
        self._n_pieces += len(ranges)
        if self._n_left and self._n_pieces % 3 == 2:
            self._version, self._n_left = self._version + 1, self._n_left - 1
            self._n_pieces = 0
        return version, found


def test_a_check_never_mixes_versions() -> None:
    engine = ChangesMidway(2)
    checked = ActiveWeights(engine, [engine.spec]).check(CheckWeights())
    content = np.full(engine.spec.size_bytes, 3, np.uint8)
    digest = xxhash.xxh3_64_intdigest(content.data)
    assert checked == CheckedWeights(3, [TensorCheck("w", digest, 0, is_zero=False)])


def test_a_check_ends_even_if_versions_change_all_the_time() -> None:
    engine = ChangesMidway(1000)
    with pytest.raises(EngineFailed) as caught:
        ActiveWeights(engine, [engine.spec]).check(CheckWeights())
    assert caught.value.code == "busy"
