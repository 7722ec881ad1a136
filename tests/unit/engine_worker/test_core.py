"""The worker core and requests: accepted, streamed, ended, repaired."""

import numpy as np
import pytest

from rolloutbus.bus.actor.effects import Connect, Publish
from rolloutbus.bus.wire.codec import pack, topic_of, unpack, unpack_result
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import (
    Abort,
    Idle,
    Prefix,
    Repair,
    Repaired,
    SamplingParams,
)
from rolloutbus.bus.wire.messages.host import EngineStarting
from rolloutbus.engine_worker.worker.effects import StartHost, TellProgress
from tests.unit.engine_worker.core_bench import Bench


def test_worker_stays_off_the_bus_until_its_engine_is_ready(new: Bench) -> None:
    new.pass_time(1.0, heartbeats=False)
    assert [type(effect) for effect in new.said.effects] == [StartHost]
    new.join()
    assert any(isinstance(effect, Connect) for effect in new.said.effects)
    assert new.said.heartbeat().state == "ready"


def test_what_the_engine_does_until_it_is_ready_is_told(new: Bench) -> None:
    new.host(Entry("engine_starting", body=pack(EngineStarting("loading weights"))))
    assert new.said.effects[-1] == TellProgress("loading weights")
    assert Connect() not in new.said.effects


def test_generate_goes_to_the_host_and_is_accepted(bench: Bench) -> None:
    bench.generate("c/1")
    assert [e.rid for e in bench.said.to_host("generate")] == ["c/1"]
    assert len(bench.said.sent("accepted")) == 1


def test_result_has_all_tokens_and_version_runs(bench: Bench) -> None:
    bench.generate("c/1")
    bench.step({"c/1": [5, 6]})
    bench.step({"c/1": [7]}, version=3)
    bench.step({"c/1": [8]}, {"c/1": "stop"}, version=3)
    result = bench.said.result("c/1")
    assert np.frombuffer(result.tokens, np.int32).tolist() == [5, 6, 7, 8]
    assert np.frombuffer(result.logprobs, np.float32).tolist() == [-5, -6, -7, -8]
    assert result.versions == [(0, 2), (3, 2)]
    assert result.finish_reason == "stop"


def test_resumed_request_returns_its_prefix_too(bench: Bench) -> None:
    prefix = Prefix(
        np.array([5, 6], np.int32).tobytes(), np.array([-1, -2], np.float32).tobytes(), [(2, 2)]
    )
    bench.generate("c/1", stream=True, prefix=prefix)
    bench.step({"c/1": [7]}, {"c/1": "length"}, version=2)
    result = bench.said.result("c/1")
    assert np.frombuffer(result.tokens, np.int32).tolist() == [5, 6, 7]
    assert (result.versions, result.n_resumed) == ([(2, 3)], 2)
    assert bench.said.rows() == [("c/1", (1, 1), 2, [7], 2)]


def test_streamed_request_is_published_each_step_under_its_clients_topic(bench: Bench) -> None:
    bench.generate("c/1", stream=True)
    bench.step({"c/1": [5]})
    bench.step({"c/1": [6]})
    assert [row[2:4] for row in bench.said.rows()] == [(0, [5]), (1, [6])]
    topics = {effect.topic for effect in bench.said.effects if isinstance(effect, Publish)}
    assert topics == {topic_of("client")}


def test_request_that_nobody_streams_is_published_in_portions(bench: Bench) -> None:
    bench.generate("c/1")
    for token in range(40):
        bench.step({"c/1": [token]})
    assert [len(row[3]) for row in bench.said.rows()] == [32]
    bench.pass_time(1.2)
    assert [len(row[3]) for row in bench.said.rows()] == [32, 8]


def test_coarse_portion_is_cut_at_a_version_change(bench: Bench) -> None:
    bench.generate("c/1")
    bench.step({"c/1": [1, 2, 3]})
    bench.step({"c/1": [4]}, {"c/1": "length"}, version=1)
    assert [row[2:] for row in bench.said.rows()] == [(0, [1, 2, 3], 0), (3, [4], 1)]


def test_idle_heartbeats_tell_how_much_was_published(bench: Bench) -> None:
    bench.generate("c/1", stream=True)
    bench.step({"c/1": [1, 2, 3]})
    bench.pass_time(0.3)
    bodies = [unpack(e.entry) for e in bench.said.effects if isinstance(e, Publish)]
    idle = [body for body in bodies if isinstance(body, Idle)]
    assert idle[-1] == Idle(["c/1"], [(1, 1)], [3])


def test_bad_request_is_refused_with_its_field(bench: Bench) -> None:
    bench.generate("c/1", prompt=(1, 999))
    assert bench.said.problem("c/1") == ("refused", "bad_request", "prompt")
    assert bench.said.to_host("generate") == []


def test_unsatisfied_version_is_refused(bench: Bench) -> None:
    bench.generate("c/1", versions="min:3")
    assert bench.said.problem("c/1") == ("refused", "not_ready", "place.versions")


def test_aborted_request_ends_with_what_it_has(bench: Bench) -> None:
    bench.generate("c/1")
    bench.step({"c/1": [1, 2]})
    bench.command("abort", "", Abort(rids=["c/1", "c/2"]))
    assert bench.said.ending("c/1").kind == "cancelled"
    assert len(bench.said.result("c/1").tokens) == 8
    assert len(bench.said.to_host("abort")) == 1
    bench.step({"c/1": [3]}, {"c/1": "abort"})
    bench.generate("c/2")
    assert bench.said.ending("c/2").kind == "cancelled"


def test_deadline_ends_a_running_request(bench: Bench) -> None:
    bench.generate("c/1")
    bench.pass_time(5.1)
    assert bench.said.problem("c/1")[:2] == ("expired", "deadline")
    assert len(bench.said.to_host("abort")) == 1


def test_lost_lease_stops_the_engine_and_reports_nothing(bench: Bench) -> None:
    bench.generate("c/1")
    bench.clock.advance(2.5)
    bench.collect(bench.core.tick(bench.now))
    assert len(bench.said.to_host("abort")) == 1
    bench.step({"c/1": [1]}, {"c/1": "stop"})
    bench.pass_time(1.0)
    assert bench.said.heartbeat().running == []
    assert bench.said.heartbeat().outbox == []


def test_repair_returns_the_missing_part(bench: Bench) -> None:
    bench.generate("c/1")
    bench.step({"c/1": [1, 2, 3]})
    bench.command("repair", "c/2@w0", Repair("c/1", (1, 1), 1))
    bench.step({"c/1": [4]}, {"c/1": "stop"}, version=2)
    bench.command("repair", "c/3@w0", Repair("c/1", (1, 1), 2))
    running = unpack_result("repair", bench.said.ending("c/2@w0"))
    ended = unpack_result("repair", bench.said.ending("c/3@w0"))
    assert isinstance(running, Repaired)
    assert isinstance(ended, Repaired)
    assert np.frombuffer(running.tokens, np.int32).tolist() == [2, 3]
    assert (running.start, running.versions) == (1, [(0, 2)])
    assert np.frombuffer(ended.tokens, np.int32).tolist() == [3, 4]
    assert ended.versions == [(0, 1), (2, 1)]


CUT = SamplingParams(max_new_tokens=100, top_p=0.9)
NAN = float("nan")


@pytest.mark.parametrize("behaviour", [None, [NAN, -1.0], [-1.0, NAN]])
def test_truncation_that_was_not_measured_fails_its_request_alone(
    bench: Bench, behaviour: list[float] | None
) -> None:
    bench.generate("c/1", sampling=CUT)
    bench.generate("c/2")
    rest = [] if behaviour is None else [*behaviour, NAN]
    bench.step({"c/1": [5, 6], "c/2": [7]}, behaviour=rest)
    (failed,) = bench.said.sent("failed")
    problem = unpack(failed)
    assert isinstance(problem, Problem)
    assert (failed.rid, problem.code, problem.field) == ("c/1", "engine_failed", "sampling")
    aborts = [unpack(each) for each in bench.said.to_host("abort")]
    assert aborts == [Abort(rids=["c/1"])]
    bench.step({"c/2": [8]}, {"c/2": "stop"})
    assert bench.said.result("c/2").behaviour_logprobs == b""


def test_truncation_that_was_measured_comes_with_its_logprobs(bench: Bench) -> None:
    bench.generate("c/1", sampling=CUT)
    bench.step({"c/1": [5]}, behaviour=[-0.5])
    bench.step({"c/1": [6]}, {"c/1": "stop"}, behaviour=[-0.25])
    result = bench.said.result("c/1")
    assert np.frombuffer(result.behaviour_logprobs, "<f4").tolist() == [-0.5, -0.25]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_new_tokens=100, top_k=10**6),
        SamplingParams(max_new_tokens=100, top_p=0.5, temperature=0.0),
    ],
)
def test_what_cuts_nothing_need_not_be_measured(bench: Bench, sampling: SamplingParams) -> None:
    bench.generate("c/1", sampling=sampling)
    bench.step({"c/1": [5]}, {"c/1": "stop"})
    assert bench.said.result("c/1").behaviour_logprobs == b""


def test_a_token_without_a_logprob_fails_its_request(bench: Bench) -> None:
    bench.generate("c/1")
    bench.step({"c/1": [5, 6]}, logprobs=[-1.0, NAN])
    (failed,) = bench.said.sent("failed")
    problem = unpack(failed)
    assert isinstance(problem, Problem)
    assert problem.code == "engine_failed"
    assert "without their logprobs" in problem.message
