"""The model of a fleet: its engines take what real ones took, and its policies keep the bound."""

import json
import sys
from dataclasses import replace

import pytest

from benchmarks.coordination.__main__ import (
    POLICIES,
    SCENES,
    main,
    measure,
    parser_of_options,
    verdicts,
)
from benchmarks.coordination.agents import AgentLoad, run_agents
from benchmarks.coordination.engines import SHAPES, Job, SimEngine, VirtualTime
from benchmarks.coordination.fleets import WAYS
from benchmarks.coordination.rl_loop import RlLoad, RlPolicy, RlRun


class _Alone:
    """One engine, and those of its requests that have ended."""

    def __init__(self, model: str = "7b") -> None:
        self.time = VirtualTime()
        self.ended: list[Job] = []
        self.engine = SimEngine("w0", SHAPES[model], self.time, self.ended.append)

    def add(self, name: str, n_prompt: int, n_new: int, own: str = "") -> Job:
        job = Job(((name, n_prompt),), n_new, self.ended.append, own=own)
        self.engine.add(job)
        return job

    def run(self, n: int) -> float:
        """Until so many have ended; returns the seconds since the start."""
        self.time.run(lambda: len(self.ended) == n)
        return self.time.now


@pytest.mark.parametrize(
    ("model", "n", "n_prompt", "n_new", "tokens_per_s"),
    [("7b", 256, 128, 384, 21_109), ("0.5b", 1, 128, 512, 826), ("0.5b", 256, 128, 512, 93_000)],
)
def test_engines_take_as_long_as_measured_ones(
    model: str, n: int, n_prompt: int, n_new: int, tokens_per_s: float
) -> None:
    alone = _Alone(model)
    for number in range(n):
        alone.add(str(number), n_prompt, n_new)
    assert n * n_new / alone.run(n) == pytest.approx(tokens_per_s, rel=0.05)


def test_what_is_cached_is_not_computed_again() -> None:
    alone = _Alone()
    alone.add("first", 10_000, 1, own="first")
    alone.run(1)
    alone.add("first", 10_000, 1, own="first")
    alone.add("other", 10_000, 1)
    alone.run(3)
    assert [job.n_cached for job in alone.ended] == [0, 9_999, 0]


def test_more_than_fits_into_memory_waits_and_ends_all_the_same() -> None:
    alone = _Alone()
    for number in range(40):
        alone.add(str(number), 50_000, 4_000, own=str(number))
    assert len(alone.engine.running) < 40
    alone.run(40)
    assert alone.engine.load == 0


def test_a_request_that_is_stopped_has_its_tokens_and_goes_on_elsewhere() -> None:
    here, there = _Alone(), _Alone()
    job = here.add("a", 100, 1_000)
    here.time.at(2.0, lambda: here.engine.remove(job))
    here.time.run(lambda: job.engine is None)
    assert 0 < job.done < 1_000
    there.engine.add(job)
    there.run(1)
    assert job.done == 1_000


@pytest.mark.parametrize("way", WAYS)
def test_each_way_brings_all_agents_to_their_end(way: str) -> None:
    found = run_agents(AgentLoad(4, 4, turns=2), way, seed=1)
    assert found["makespan_s"] > 0
    assert 0 < found["hit_rate"] < 1


def test_agents_that_name_their_sessions_find_their_cache() -> None:
    load = AgentLoad(4, 8, turns=4)
    named, blind = run_agents(load, "bus_names", 1), run_agents(load, "bus", 1)
    assert named["hit_rate"] > blind["hit_rate"] + 0.1
    assert named["makespan_s"] < blind["makespan_s"]


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_trains_on_what_is_too_old(name: str, scene: str) -> None:
    load = replace(RlLoad(8, 3, 1, n_steps=6, new_tokens=200), **SCENES[scene])
    found = RlRun(load, POLICIES[name], seed=1).run()
    assert found["oldest"] <= 1
    assert found["trained_tokens_per_h"] > 0
    if POLICIES[name].late == "wait":
        assert found["n_dropped"] == 0


def test_slow_engines_are_relieved() -> None:
    load = RlLoad(8, 4, 1, n_steps=6, new_tokens=500, slow_share=0.25, slowness=4.0)
    left = RlRun(load, RlPolicy(), seed=1).run()
    moved = RlRun(load, RlPolicy(moves=True), seed=1).run()
    drained = RlRun(load, RlPolicy(relieves=True), seed=1).run()
    assert moved["trained_tokens_per_h"] > 1.2 * left["trained_tokens_per_h"]
    assert drained["trained_tokens_per_h"] > 1.2 * left["trained_tokens_per_h"]


def test_a_seed_gives_the_same_figures_again() -> None:
    options = ["--engines", "2", "--seeds", "1", "--json", "--turns", "1", "--steps", "5"]
    options += ["--staleness", "1", "--scenes", "even", "--ways", "least_loaded", "bus_names"]
    asked = parser_of_options().parse_args([*options, "--policies", "bus", "bus_moves"])
    first, second = measure(asked), measure(asked)
    del first["took_s"], second["took_s"]
    assert first == second


def test_goals_are_judged_by_the_worst_fleet() -> None:
    agents = [
        {"way": "bus_names", "to_least_loaded": [0.5, 0.4, 0.6], "to_cache_aware": [0.9, 0.9, 1.2]},
        {"way": "bus_both", "to_least_loaded": [0.7, 0.4, 0.9], "to_cache_aware": [1.1, 0.9, 1.2]},
    ]
    to_baselines = {"to_least_loaded_drop": [1.4, 1, 2], "to_least_loaded_wait": [1.2, 1, 2]}
    rl = [{"policy": "bus_moves", "scene": "even", **to_baselines}]
    told = verdicts(agents, rl)
    assert told["makespan_to_least_loaded"]["is_met"] is True
    assert told["makespan_to_cache_aware"] == {"ratio": 1.1, "goal": 1.0, "is_met": False}
    even = {"ratio": 1.2, "goal": 1.3, "is_met": False, "is_kept": True}
    assert told["trained_tokens_even"] == even


def test_it_prints_one_json_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--only", "agents", "--engines", "2", "--seeds", "1", "--turns", "1", "--json"]
    monkeypatch.setattr(sys, "argv", ["coordination", *asked, "--ways", "bus"])
    main()
    report = json.loads(capsys.readouterr().out)
    assert [row["way"] for row in report["agents"]] == ["bus"]
    assert report["rl"] == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--engines", "0"], "a whole number from 1 on, not '0'"),
        (["--steps", "4"], "a whole number from 5 on, not '4'"),
        (["--staleness", "-1"], "a whole number from 0 on, not '-1'"),
        (["--policies", "bus_move"], "invalid choice: 'bus_move'"),
        (["--ways", "smg"], "invalid choice: 'smg'"),
    ],
)
def test_an_argument_that_cannot_be_is_told(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser_of_options().parse_args(arguments)
    assert told in capsys.readouterr().err
