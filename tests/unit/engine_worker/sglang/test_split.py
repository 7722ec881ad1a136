"""How a model may be split, whatever the spelling of the argument that says so."""

import pytest

from rolloutbus.engine_worker.engines.sglang.settings import OURS, SglangSettings, first_gpu, named

SPELLINGS = {
    "dp_size": ["dp_size", "dp-size", "dp", "data-parallel-size", "--dp-size", "DP_SIZE"],
    "pp_size": ["pp_size", "pp-size", "pp", "pipeline_parallel_size"],
    "gpu_id_step": ["gpu_id_step", "gpu-id-step"],
}


@pytest.mark.parametrize("value", [2, "2", "8"])
@pytest.mark.parametrize(
    ("name", "spelt"), [(name, spelt) for name in SPELLINGS for spelt in SPELLINGS[name]]
)
def test_a_split_that_cannot_be_served_is_refused(name: str, spelt: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"arguments: {name}: . cannot be served: "):
        SglangSettings("m", arguments={spelt: value})


@pytest.mark.parametrize("name", [each for names in SPELLINGS.values() for each in names])
def test_one_of_each_is_no_split(name: str) -> None:
    SglangSettings("m", arguments={name: "1"})


@pytest.mark.parametrize("spelt", ["tp", "tp-size", "tensor_parallel_size", "tp_size"])
def test_gpus_are_counted_whatever_the_spelling(spelt: str) -> None:
    arguments = named({spelt: "2", "base-gpu-id": "1"})
    assert [first_gpu(arguments, i) for i in range(3)] == [1, 3, 5]


@pytest.mark.parametrize(
    ("name", "value"),
    [("tp_size", "two"), ("tp", 0), ("dp_size", True), ("base_gpu_id", -1), ("pp", None)],
)
def test_a_number_that_is_none_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match="is no whole number of at least"):
        SglangSettings("m", arguments={name: value})


@pytest.mark.parametrize("name", OURS)
def test_an_argument_that_has_a_setting_is_refused_before_an_engine_starts(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} follows from the worker's settings"):
        SglangSettings("m", arguments={name.replace("_", "-"): 1})


def test_an_argument_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="tp_size is given twice"):
        SglangSettings("m", arguments={"tp": 1, "tp-size": 2})
