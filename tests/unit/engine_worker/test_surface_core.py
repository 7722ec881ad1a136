"""The worker core and what few engines can do: arrays in results, features, adapters, refusals."""

import msgspec
import numpy as np
import pytest

from rolloutbus.bus.wire.codec import array_of, pack, unpack, unpack_result
from rolloutbus.bus.wire.commands import COMMAND_OF
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Entry, Placement
from rolloutbus.bus.wire.messages.control import (
    Adapters,
    Embed,
    FlushCache,
    GetLoad,
    Load,
    LoadLora,
    Memory,
    Pause,
    Rerank,
    SaveWeights,
    Score,
    Scored,
    ServerFacts,
    ServerInfo,
    Sleep,
    StartProfile,
    StopProfile,
    UnloadLora,
)
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.generation import Generate, SamplingParams, Want
from rolloutbus.bus.wire.messages.host import EngineReady, Extras
from rolloutbus.bus.wire.messages.weights import CommitUpdate
from rolloutbus.engine_worker.worker.controller import HOST_COMMANDS
from tests.unit.engine_worker.core_bench import READY, Bench

PROMPT = np.array([1, 2], np.int32).tobytes()
SCORE = Score(PROMPT, [PROMPT], [1])
SCORED = Scored(array_of(np.zeros((1, 1), np.float32)), 4)
STATES = {"hidden_states": array_of(np.arange(4, dtype=np.float32).reshape(1, 4))}


def engine_with(*features: str, **adapters: int) -> EngineReady:
    return EngineReady(
        *("fake", 64, 128, 4, [0], sorted(HOST_COMMANDS)),
        features=list(features),
        adapters=adapters,
    )


def joined(new: Bench, ready: EngineReady) -> Bench:
    new.host(Entry("engine_ready", body=pack(ready)))
    new.lease()
    return new


def generate(bench: Bench, rid: str, **wishes: object) -> None:
    body = msgspec.structs.replace(Generate(PROMPT, SamplingParams(max_new_tokens=9)), **wishes)
    bench.command("generate", rid, body, Placement("default"))


def say_extras(bench: Bench, rid: str, attempt: tuple[int, int] = (1, 1)) -> None:
    bench.host(Entry("extras", rid, attempt, body=pack(Extras(rid, attempt, STATES))))


def test_arrays_that_come_before_the_end_are_in_the_result(new: Bench) -> None:
    bench = joined(new, engine_with("hidden_states_last"))
    generate(bench, "c/1", want=Want(hidden_states="last"))
    bench.step({"c/1": [5]})
    say_extras(bench, "c/1")
    bench.step({"c/1": [6]}, {"c/1": "length"})
    assert bench.said.result("c/1").arrays == STATES


def say_adapter(bench: Bench, rid: str, lora: str) -> None:
    bench.host(Entry("extras", rid, (1, 1), body=pack(Extras(rid, (1, 1), lora=lora))))


def test_a_result_tells_the_adapter_that_the_engine_gave_it(new: Bench) -> None:
    bench = joined(new, engine_with("lora", "hidden_states_last", judge=5))
    generate(bench, "c/1", lora="judge", want=Want(hidden_states="last"))
    say_adapter(bench, "c/1", "judge@6")  # loaded since the worker last heard of it
    bench.step({"c/1": [5]})
    say_extras(bench, "c/1")
    bench.step({"c/1": [6]}, {"c/1": "length"})
    result = bench.said.result("c/1")
    assert (result.lora, result.arrays) == ("judge@6", STATES)


@pytest.mark.parametrize("told", ["", "other@5", "judge@6"])
def test_tokens_of_an_adapter_that_was_not_told_are_no_result(new: Bench, told: str) -> None:
    bench = joined(new, engine_with("lora", judge=5))
    generate(bench, "c/1", lora="judge@5")
    if told:
        say_adapter(bench, "c/1", told)
    bench.step({"c/1": [5]})
    assert bench.said.problem("c/1") == ("failed", "engine_failed", "lora")


def test_a_result_without_adapter_tells_none(new: Bench) -> None:
    bench = joined(new, engine_with("lora", judge=5))
    generate(bench, "c/1")
    bench.step({"c/1": [5]}, {"c/1": "length"})
    assert bench.said.result("c/1").lora == ""


def test_arrays_of_another_attempt_or_of_nobody_are_dropped(new: Bench) -> None:
    bench = joined(new, engine_with("hidden_states_last"))
    generate(bench, "c/1", want=Want(hidden_states="last"))
    say_extras(bench, "c/1", (1, 9))
    say_extras(bench, "c/2")
    bench.step({"c/1": [6]}, {"c/1": "length"})
    assert bench.said.result("c/1").arrays == {}


def test_a_request_that_the_engine_gives_up_ends_with_what_it_says(bench: Bench) -> None:
    generate(bench, "c/1")
    bench.step({"c/1": [5]})
    bench.host_ends("failed", "c/1", Problem("result_too_large", "too much", "failed", "want"))
    assert bench.said.problem("c/1") == ("failed", "result_too_large", "want")
    bench.step({"c/1": [6]}, {"c/1": "stop"})
    assert bench.said.problem("c/1") == ("failed", "result_too_large", "want")


def test_a_wish_that_the_engine_cannot_grant_fails_by_its_field(bench: Bench) -> None:
    generate(bench, "c/1", want=Want(top_logprobs=3))
    assert bench.said.problem("c/1") == ("failed", "unsupported", "want.top_logprobs")
    assert bench.said.to_host("generate") == []


def test_a_wish_beyond_its_limit_is_refused_before_the_engine_is_asked_for_it(
    bench: Bench,
) -> None:
    generate(bench, "c/1", want=Want(top_logprobs=65))
    assert bench.said.problem("c/1") == ("refused", "bad_request", "want.top_logprobs")


def test_a_malformed_wish_is_refused_by_its_field(bench: Bench) -> None:
    wish: dict[str, object] = {
        "prompt": PROMPT,
        "sampling": {},
        "media": [{"kind": "smell", "data": b"x"}],
    }
    raw = msgspec.Raw(msgspec.msgpack.encode(wish))
    entry = Entry("generate", "c/1", (1, 1), bench.core.member.epoch, "client", 5000, body=raw)
    bench.router(entry)
    assert bench.said.problem("c/1") == ("refused", "bad_request", "media[0].kind")


@pytest.mark.parametrize(("cost", "is_true"), [(9, False), (10, True), (0, True), (10**6, False)])
def test_a_request_that_costs_more_or_less_than_it_says_is_refused(
    bench: Bench, cost: int, *, is_true: bool
) -> None:
    n_prompt = len(PROMPT) // 4
    place = Placement("default", cost=cost)
    bench.command("generate", "c/1", Generate(PROMPT, SamplingParams(10 - n_prompt)), place)
    if is_true:
        assert len(bench.said.to_host("generate")) == 1
    else:
        assert bench.said.problem("c/1") == ("refused", "bad_request", "place.cost")


def test_placement_travels_to_the_host(bench: Bench) -> None:
    place = Placement("default", session="conv-1", priority=7)
    bench.command("generate", "c/1", Generate(PROMPT, SamplingParams(9)), place)
    (entry,) = bench.said.to_host("generate")
    assert entry.place is not None
    assert (entry.place.session, entry.place.priority) == ("conv-1", 7)


def test_an_adapter_may_be_named_once_it_is_loaded_and_until_it_is_unloaded(new: Bench) -> None:
    bench = joined(new, engine_with("lora"))
    generate(bench, "c/1", lora="judge")
    assert bench.said.problem("c/1") == ("refused", "bad_request", "lora")
    bench.command("load_lora", "c/2@w0", LoadLora("judge", 3, path="judge"))
    generate(bench, "c/3", lora="judge")
    assert bench.said.problem("c/3") == ("refused", "bad_request", "lora")
    bench.host_ends("finished", "c/2@w0", Adapters({"judge": 3}))
    generate(bench, "c/4", lora="judge")
    generate(bench, "c/5", lora="judge@3")
    assert [entry.rid for entry in bench.said.to_host("generate")] == ["c/4", "c/5"]
    generate(bench, "c/6", lora="judge@2")
    assert bench.said.problem("c/6") == ("refused", "bad_request", "lora")
    bench.command("unload_lora", "c/7@w0", UnloadLora("judge"))
    bench.host_ends("finished", "c/7@w0", Adapters({}))
    generate(bench, "c/8", lora="judge")
    assert bench.said.problem("c/8") == ("refused", "bad_request", "lora")


def test_a_new_engine_has_only_the_adapters_that_it_names(new: Bench) -> None:
    bench = joined(new, engine_with("lora", judge=3))
    generate(bench, "c/1", lora="judge")
    assert len(bench.said.to_host("generate")) == 1
    bench.collect(bench.core.host_exited("exit 1", bench.now))
    joined(bench, engine_with("lora", other=1))
    generate(bench, "c/2", lora="judge")
    assert bench.said.problem("c/2") == ("refused", "bad_request", "lora")


def test_server_info_tells_features_software_ranks_adapters_and_sleep(bench: Bench) -> None:
    bench.command("load_lora", "c/1@w0", LoadLora("judge", 3, path="judge"))
    bench.host_ends("finished", "c/1@w0", Adapters({"judge": 3}))
    bench.command("sleep", "c/2@w0", Sleep(["cuda_graph"]))
    bench.host_ends("finished", "c/2@w0", Memory({"cuda_graph": 1}, ["cuda_graph"]))
    bench.command("server_info", "c/3@w0", ServerInfo())
    facts = unpack_result("server_info", bench.said.ending("c/3@w0"))
    assert isinstance(facts, ServerFacts)
    assert (facts.features, facts.parallel) == (["min_new_tokens", "seed"], {"tp": 2})
    assert (facts.software, facts.adapters) == ({"fake": "1"}, {"judge": 3})
    assert (facts.asleep, facts.state) == (["cuda_graph"], "asleep")


def test_a_command_goes_to_the_host_and_its_result_to_the_client(bench: Bench) -> None:
    bench.command("score", "c/1@w0", SCORE)
    assert [unpack(entry) for entry in bench.said.to_host("score")] == [SCORE]
    bench.host_ends("finished", "c/1@w0", SCORED)
    assert unpack_result("score", bench.said.ending("c/1@w0")) == SCORED


@pytest.mark.parametrize(
    "body",
    [
        *(SCORE, Embed([PROMPT]), Rerank([("a", "b")]), FlushCache(), GetLoad()),
        *(LoadLora("judge", 3, path="judge"), UnloadLora("judge")),
        *(SaveWeights("disk", "a", "sharded"), StartProfile(), StopProfile()),
    ],
)
def test_a_command_that_the_engine_cannot_do_fails_as_unsupported(
    new: Bench, body: msgspec.Struct
) -> None:
    bench = joined(new, EngineReady("bare", 64, 128, 4, [], ["pause", "resume"]))
    bench.command(COMMAND_OF[type(body)], "c/1@w0", body)
    assert bench.said.problem("c/1@w0")[:2] == ("failed", "unsupported")


def test_values_are_checked_before_the_engine_is_asked(bench: Bench) -> None:
    outside = np.array([64], np.int32).tobytes()
    bench.command("score", "c/1@w0", Score(b"", [outside], [1]))
    assert bench.said.problem("c/1@w0") == ("refused", "bad_request", "items")
    bench.command("embed", "c/2@w0", Embed([PROMPT * 65]))
    assert bench.said.problem("c/2@w0") == ("refused", "bad_request", "inputs")
    assert bench.said.to_host("score") == bench.said.to_host("embed") == []


def test_texts_are_not_read_by_an_engine_that_sleeps_or_pauses(bench: Bench) -> None:
    bench.command("pause", "c/1@w0", Pause())
    bench.host_ends("finished", "c/1@w0", Done())
    bench.command("score", "c/2@w0", SCORE)
    assert bench.said.problem("c/2@w0")[:2] == ("refused", "not_ready")
    bench.command("get_load", "c/3@w0", GetLoad())
    bench.host_ends("finished", "c/3@w0", Load({"usage": 0.5}))
    assert bench.said.ending("c/3@w0").kind == "finished"


def test_an_engine_that_reads_texts_is_not_put_to_sleep(bench: Bench) -> None:
    bench.command("score", "c/1@w0", SCORE)
    bench.command("sleep", "c/2@w0", Sleep(["weights"]))
    assert bench.said.problem("c/2@w0")[:2] == ("refused", "busy")
    bench.host_ends("finished", "c/1@w0", SCORED)
    bench.command("sleep", "c/3@w0", Sleep(["weights"]))
    assert [entry.rid for entry in bench.said.to_host("sleep")] == ["c/3@w0"]


@pytest.mark.parametrize(
    ("asleep", "is_refused"), [("weights", True), ("kv_cache", False), ("cuda_graph", False)]
)
def test_weights_are_saved_while_they_are_there(
    bench: Bench, asleep: str, *, is_refused: bool
) -> None:
    tags = msgspec.convert({"tags": [asleep]}, Sleep)
    bench.command("sleep", "c/1@w0", tags)
    bench.host_ends("finished", "c/1@w0", Memory({asleep: 9}, [asleep]))
    bench.command("save_weights", "c/2@w0", SaveWeights("disk", "a", "sharded"))
    assert len(bench.said.to_host("save_weights")) == (0 if is_refused else 1)


def test_weights_are_not_saved_while_they_change(bench: Bench) -> None:
    bench.command("commit_update", "c/1@w0", CommitUpdate("default", 5, "keep"))
    bench.command("save_weights", "c/2@w0", SaveWeights("disk", "a", "sharded"))
    assert bench.said.problem("c/2@w0")[:2] == ("refused", "update_in_progress")


def test_a_silent_host_is_given_time_to_write(bench: Bench) -> None:
    bench.command("save_weights", "c/1@w0", SaveWeights("disk", "a", "sharded"))
    bench.pass_time(60.0, heartbeats=False)
    assert not [each for each in bench.said.effects if type(each).__name__ == "KillHost"]


def load_lora(bench: Bench, rid: str, name: str, version: int, **now_loaded: int) -> None:
    bench.command("load_lora", rid, LoadLora(name, version, path=name))
    bench.host_ends("finished", rid, Adapters({name: version, **now_loaded}))


def crash(bench: Bench) -> None:
    bench.collect(bench.core.host_exited("killed", bench.now))


def again(bench: Bench, kind: str, name: str, **adapters: int) -> None:
    """The host ends what the worker itself has told it to load."""
    body = Adapters(adapters) if kind == "finished" else Problem("engine_failed", "no", "failed")
    bench.host(Entry(kind, f"again/{name}", NO_ATTEMPT, body=pack(body)))


def reloaded(bench: Bench, n_before: int) -> list[tuple[str, int]]:
    bodies = [unpack(entry) for entry in bench.said.to_host("load_lora")[n_before:]]
    return [(body.name, body.version) for body in bodies if isinstance(body, LoadLora)]


def test_a_new_engine_gets_as_many_adapters_as_the_one_before_had(bench: Bench) -> None:
    names = [f"a{number}" for number in range(70)]
    loaded: dict[str, int] = {}
    for number, name in enumerate(names):
        load_lora(bench, f"c/{number}", name, 1, **loaded)
        loaded[name] = 1
    n_loads = len(bench.said.to_host("load_lora"))
    crash(bench)
    bench.host(Entry("engine_ready", body=pack(READY)))
    for name in names:
        again(bench, "finished", name, **loaded)
    assert reloaded(bench, n_loads) == [(name, 1) for name in names]


def test_a_new_engine_gets_the_adapters_of_the_one_before_and_only_then_joins(
    bench: Bench,
) -> None:
    load_lora(bench, "c/1", "a", 1)
    load_lora(bench, "c/2", "b", 1, a=1)
    load_lora(bench, "c/3", "a", 2, b=1)
    load_lora(bench, "c/4", "gone", 1, a=2, b=1)
    bench.command("unload_lora", "c/5", UnloadLora("gone"))
    bench.host_ends("finished", "c/5", Adapters({"a": 2, "b": 1}))
    n_loads, n_hellos = len(bench.said.to_host("load_lora")), len(bench.said.sent("hello"))

    crash(bench)
    bench.host(Entry("engine_ready", body=pack(READY)))
    assert len(bench.said.sent("hello")) == n_hellos
    again(bench, "finished", "a", a=2)
    assert len(bench.said.sent("hello")) == n_hellos
    again(bench, "finished", "b", a=2, b=1)

    assert reloaded(bench, n_loads) == [("a", 2), ("b", 1)]
    assert len(bench.said.sent("hello")) == n_hellos + 1


def test_an_adapter_that_cannot_be_had_again_keeps_no_engine_from_its_work(bench: Bench) -> None:
    load_lora(bench, "c/1", "a", 1)
    n_hellos = len(bench.said.sent("hello"))

    crash(bench)
    bench.host(Entry("engine_ready", body=pack(READY)))
    again(bench, "failed", "a")

    assert len(bench.said.sent("hello")) == n_hellos + 1


def test_an_engine_that_dies_while_it_loads_adapters_again_loses_none_of_them(
    bench: Bench,
) -> None:
    load_lora(bench, "c/1", "a", 1)
    load_lora(bench, "c/2", "b", 1, a=1)
    crash(bench)
    bench.host(Entry("engine_ready", body=pack(READY)))
    again(bench, "finished", "a", a=1)
    n_loads = len(bench.said.to_host("load_lora"))

    crash(bench)
    bench.host(Entry("engine_ready", body=pack(READY)))
    again(bench, "finished", "a", a=1)

    assert sorted(reloaded(bench, n_loads)) == [("a", 1), ("b", 1)]
