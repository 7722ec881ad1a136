"""Commands beyond generation and weights meet an engine that can do all of them."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest

from rolloutbus.bus.wire.codec import numpy_of, pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.control import (
    Adapters,
    Embed,
    Embedded,
    FlushCache,
    Flushed,
    GetLoad,
    Load,
    LoadLora,
    Memory,
    Profiled,
    Rerank,
    Reranked,
    Saved,
    SaveWeights,
    Score,
    Scored,
    Sleep,
    StartProfile,
    StopProfile,
    UnloadLora,
)
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.engine_worker.engine import Engine
from rolloutbus.engine_worker.host.commands import HostCommands
from rolloutbus.engine_worker.host.files import OperatorPaths
from rolloutbus.engine_worker.weights.adapter_sources import CONFIG, TENSORS
from rolloutbus.engine_worker.worker.controller import HOST_COMMANDS
from tests.capable_engine import CapableEngine


@pytest.fixture
def engine() -> Iterator[CapableEngine]:
    engine = CapableEngine()
    yield engine
    engine.close()


@pytest.fixture
def paths(tmp_path: Path) -> OperatorPaths:
    (tmp_path / "out").mkdir()
    adapter = tmp_path / "weights" / "adapters" / "judge-1.5"
    adapter.mkdir(parents=True)
    (adapter / CONFIG).write_text("{}")
    (adapter / TENSORS).write_bytes(b"tensors")
    targets = {"disk": str(tmp_path / "out"), "bucket": "redis://bucket/models/"}
    return OperatorPaths(str(tmp_path / "weights"), targets, str(tmp_path / "profiles"))


@pytest.fixture
def commands(engine: CapableEngine, paths: OperatorPaths) -> HostCommands:
    return HostCommands(engine, 5.0, paths=paths)


def inside(folder: str) -> list[str]:
    return [each.name for each in Path(folder).iterdir()]


def link(paths: OperatorPaths) -> None:
    root = Path(paths.weights_root)
    (root / "linked").symlink_to(root / "adapters")


def ints(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


async def done(commands: HostCommands, kind: str, body: msgspec.Struct) -> msgspec.Struct:
    ended, result = await commands.carry_out(Entry(kind, "c/1", body=pack(body)))
    assert ended == "finished", result
    return result


async def failed(commands: HostCommands, kind: str, body: msgspec.Struct) -> Problem:
    ended, problem = await commands.carry_out(Entry(kind, "c/1", body=pack(body)))
    assert ended == "failed"
    assert isinstance(problem, Problem)
    return problem


async def test_an_engine_with_every_part_can_do_every_command(commands: HostCommands) -> None:
    assert commands.capabilities == sorted(HOST_COMMANDS)


@dataclass(frozen=True)
class Without:
    """An engine that lacks a part."""

    engine: Engine
    part: str

    def __getattr__(self, name: str) -> object:
        return None if name == self.part else getattr(self.engine, name)


@pytest.mark.parametrize(
    ("part", "commands"),
    [
        (
            "weights",
            {
                *("prepare_update", "commit_update", "abort_update"),
                *("check_weights", "get_weights", "list_weights"),
            },
        ),
        ("memory", {"sleep", "wake_up"}),
        ("cache", {"flush_cache"}),
        ("lora", {"load_lora", "unload_lora"}),
        ("scorer", {"score"}),
        ("embedder", {"embed"}),
        ("reranker", {"rerank"}),
        ("checkpointer", {"save_weights"}),
        ("profiler", {"start_profile", "stop_profile"}),
        ("meter", {"get_load"}),
    ],
)
def test_commands_whose_part_an_engine_lacks_are_not_advertised(
    engine: CapableEngine, part: str, commands: set[str]
) -> None:
    lacking = cast("Engine", Without(engine, part))
    assert HOST_COMMANDS - set(HostCommands(lacking, 1.0).capabilities) == commands


@pytest.mark.parametrize(
    ("softmax", "item_first", "scores"),
    [(True, False, [[6.5, 7.5], [3.5, 4.5]]), (False, True, [[-13.0, -15.0], [-7.0, -9.0]])],
)
async def test_scores_are_a_row_per_item_and_a_column_per_label(
    commands: HostCommands, softmax: bool, item_first: bool, scores: list[list[float]]
) -> None:
    ask = Score(ints(1, 2), [ints(3, 4), ints(1)], [3, 5], softmax, item_first)
    scored = await done(commands, "score", ask)
    assert isinstance(scored, Scored)
    assert numpy_of(scored.scores).tolist() == scores
    assert scored.n_prompt_tokens == 7


async def test_embeddings_are_a_row_per_input(commands: HostCommands) -> None:
    embedded = await done(commands, "embed", Embed([ints(2, 3), ints(7)]))
    assert isinstance(embedded, Embedded)
    assert numpy_of(embedded.embeddings).tolist() == [[2.0, 5.0], [7.0, 7.0]]
    cut = await done(commands, "embed", Embed([ints(2, 3)], 1))
    assert isinstance(cut, Embedded)
    assert numpy_of(cut.embeddings).tolist() == [[2.0]]


async def test_ranks_are_a_number_per_pair(commands: HostCommands) -> None:
    reranked = await done(commands, "rerank", Rerank([("a b", "b a c"), ("a", "b")]))
    assert isinstance(reranked, Reranked)
    assert numpy_of(reranked.scores).tolist() == [2.0, 0.0]


async def test_what_the_engine_finds_wrong_is_the_callers_fault(commands: HostCommands) -> None:
    problem = await failed(commands, "embed", Embed([ints(13)]))
    assert (problem.code, problem.outcome) == ("bad_request", "not_started")
    assert "unlucky" in problem.message


async def test_a_result_that_fits_into_no_body_fails_by_name(commands: HostCommands) -> None:
    problem = await failed(commands, "embed", Embed([ints(1)], 4 * 1024 * 1024 + 1))
    assert (problem.code, problem.outcome) == ("result_too_large", "failed")


async def test_only_the_devices_tier_is_flushed_unless_others_are_named(
    engine: CapableEngine, commands: HostCommands
) -> None:
    assert await done(commands, "flush_cache", FlushCache()) == Flushed(7)
    assert engine.cache.flushed == ["device"]
    assert await done(commands, "flush_cache", FlushCache(["host"])) == Flushed(7)
    assert engine.cache.flushed == ["device", "host"]


async def test_an_engine_that_is_busy_says_so(commands: HostCommands) -> None:
    problem = await failed(commands, "flush_cache", FlushCache(["storage"]))
    assert (problem.code, problem.outcome) == ("busy", "not_started")


async def test_an_unknown_memory_tag_is_no_failure_of_the_engine(commands: HostCommands) -> None:
    problem = await failed(commands, "sleep", Sleep(["weights", "cuda_graph"]))
    assert (problem.code, problem.field) == ("bad_request", "tags")
    memory = await done(commands, "sleep", Sleep(["weights"]))
    assert isinstance(memory, Memory)
    assert memory.asleep == ["weights"]


async def test_an_adapter_is_loaded_from_a_directory_below_the_root(
    engine: CapableEngine, commands: HostCommands, paths: OperatorPaths
) -> None:
    ask = LoadLora("judge", 3, path="adapters/judge-1.5")
    assert await done(commands, "load_lora", ask) == Adapters({"judge": 3})
    assert engine.lora.sources == [Path(paths.weights_root, "adapters/judge-1.5")]
    assert commands.adapters == {"judge": 3}
    assert await done(commands, "unload_lora", UnloadLora("judge")) == Adapters({})
    problem = await failed(commands, "unload_lora", UnloadLora("judge"))
    assert problem.code == "bad_request"


@pytest.mark.parametrize(
    "path", ["../weights/adapters/judge-1.5", "/etc", "adapters", "adapters/x"]
)
async def test_a_path_that_leads_to_no_adapter_below_the_root_is_refused(
    engine: CapableEngine, commands: HostCommands, path: str
) -> None:
    problem = await failed(commands, "load_lora", LoadLora("judge", 1, path=path))
    assert (problem.code, problem.field) == ("bad_request", "path")
    assert engine.lora.sources == []


async def test_an_adapter_behind_a_link_is_refused(
    engine: CapableEngine, commands: HostCommands, paths: OperatorPaths
) -> None:
    link(paths)
    ask = LoadLora("judge", 1, path="linked/judge-1.5")
    assert (await failed(commands, "load_lora", ask)).field == "path"
    assert engine.lora.sources == []


async def test_an_adapter_beside_a_pickle_is_refused(
    engine: CapableEngine, commands: HostCommands, paths: OperatorPaths
) -> None:
    folder = f"{paths.weights_root}/adapters/judge-1.5"
    shutil.copy(f"{folder}/{TENSORS}", f"{folder}/adapter_model.bin")
    ask = LoadLora("judge", 1, path="adapters/judge-1.5")
    problem = await failed(commands, "load_lora", ask)
    assert "adapter_model.bin" in problem.message
    assert engine.lora.sources == []


@pytest.mark.parametrize(
    ("kind", "body", "setting"),
    [
        ("load_lora", LoadLora("judge", 1, path="x"), "weights_root"),
        ("save_weights", SaveWeights("disk", "a", "sharded"), "save_targets"),
        ("start_profile", StartProfile(), "profile_dir"),
    ],
)
async def test_what_the_operator_does_not_allow_is_unsupported_and_names_the_setting(
    engine: CapableEngine, kind: str, body: msgspec.Struct, setting: str
) -> None:
    problem = await failed(HostCommands(engine, 5.0), kind, body)
    assert (problem.code, problem.outcome) == ("unsupported", "not_started")
    assert setting in problem.message


async def test_weights_are_written_below_the_named_place(
    commands: HostCommands, paths: OperatorPaths
) -> None:
    saved = await done(commands, "save_weights", SaveWeights("disk", "step-1", "safetensors"))
    folder = Path(paths.save_targets["disk"], "step-1")
    assert saved == Saved(str(folder), ["a.safetensors", "more/b.safetensors"], 10)
    assert (folder / "more" / "b.safetensors").read_bytes() == b"12345"


async def test_what_was_saved_before_is_never_overwritten(
    engine: CapableEngine, commands: HostCommands
) -> None:
    ask = SaveWeights("disk", "step-1", "sharded")
    await done(commands, "save_weights", ask)
    problem = await failed(commands, "save_weights", ask)
    assert (problem.code, problem.field) == ("bad_request", "name")
    assert len(engine.checkpointer.saved) == 1


async def test_of_a_save_that_fails_nothing_is_left(
    engine: CapableEngine, commands: HostCommands, paths: OperatorPaths
) -> None:
    engine.checkpointer.fails = True
    await failed(commands, "save_weights", SaveWeights("disk", "step-1", "sharded"))
    assert inside(paths.save_targets["disk"]) == []


async def test_remote_weights_go_to_the_named_address(
    engine: CapableEngine, commands: HostCommands
) -> None:
    saved = await done(commands, "save_weights", SaveWeights("bucket", "step-1", "remote"))
    assert saved == Saved("redis://bucket/models/step-1", [], 0)
    assert engine.checkpointer.saved == [("redis://bucket/models/step-1", "remote")]


@pytest.mark.parametrize(
    ("target", "kind", "code", "field"),
    [
        ("elsewhere", "sharded", "unsupported", "target"),
        ("bucket", "sharded", "bad_request", "kind"),
        ("disk", "remote", "bad_request", "kind"),
    ],
)
async def test_a_place_that_is_not_named_or_does_not_fit_is_refused(
    commands: HostCommands, target: str, kind: str, code: str, field: str
) -> None:
    body = msgspec.convert({"target": target, "name": "a", "kind": kind}, SaveWeights)
    problem = await failed(commands, "save_weights", body)
    assert (problem.code, problem.field) == (code, field)


async def test_a_profile_tells_its_files_relative_to_the_operators_directory(
    commands: HostCommands, paths: OperatorPaths
) -> None:
    begun = await done(commands, "start_profile", StartProfile())
    assert isinstance(begun, Done)
    profiled = await done(commands, "stop_profile", StopProfile())
    assert profiled == Profiled([f"{begun.note}/trace.json"])
    assert (Path(paths.profile_dir) / begun.note / "trace.json").read_text() == "{}"


async def test_one_profile_at_a_time(commands: HostCommands) -> None:
    assert (await failed(commands, "stop_profile", StopProfile())).code == "busy"
    await done(commands, "start_profile", StartProfile())
    assert (await failed(commands, "start_profile", StartProfile())).code == "busy"
    await done(commands, "stop_profile", StopProfile())
    await done(commands, "start_profile", StartProfile())


async def test_after_a_profile_that_could_not_be_ended_another_one_begins(
    commands: HostCommands, paths: OperatorPaths
) -> None:
    await done(commands, "start_profile", StartProfile())
    shutil.rmtree(paths.profile_dir)
    await failed(commands, "stop_profile", StopProfile())
    await done(commands, "start_profile", StartProfile())


async def test_a_profile_that_could_not_begin_leaves_nothing(
    commands: HostCommands, paths: OperatorPaths
) -> None:
    problem = await failed(commands, "start_profile", StartProfile(activities=["TPU"]))
    assert problem.code == "bad_request"
    assert inside(paths.profile_dir) == []
    await done(commands, "start_profile", StartProfile())


async def test_load_is_the_engines_gauges(commands: HostCommands) -> None:
    assert await done(commands, "get_load", GetLoad()) == Load({"n_running": 0.0, "usage": 0.25})
