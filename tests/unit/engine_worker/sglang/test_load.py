"""Gauges are every number that SGLang tells of its load, and nothing else."""

from rolloutbus.engine_worker.engines.sglang.operations import gauges_of


def test_numbers_have_the_path_they_were_found_at() -> None:
    told = {
        "num_running_reqs": 3,
        "token_usage": 0.25,
        "is_busy": True,
        "name": "x",
        "nothing": None,
        "decode_moments": [1.0, 2.0],
        "memory": {"weight_gb": 14.5, "graphs": {"n": 2}},
    }

    assert gauges_of({0: told}) == {
        "num_running_reqs": 3.0,
        "token_usage": 0.25,
        "is_busy": 1.0,
        "memory.weight_gb": 14.5,
        "memory.graphs.n": 2.0,
    }


def test_ranks_after_the_first_say_which_they_are() -> None:
    assert gauges_of({0: {"n": 1}, 2: {"n": 5}}) == {"n": 1.0, "dp2.n": 5.0}
