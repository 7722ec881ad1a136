"""How a model may be split, whatever the spelling of the argument that says so."""

import pytest

from rolloutbus.engine_worker.engines.sglang.settings import (
    OF_WHOLE_MODELS,
    OURS,
    SglangSettings,
    first_gpu,
    n_gpus,
    named,
)

SPELLINGS = {
    "attn_dp_size": ["attn_dp_size", "--attn-dp-size", "ATTN_DP_SIZE"],
    "dwdp_size": ["dwdp_size"],
    "gpu_id_step": ["gpu_id_step", "gpu-id-step"],
}
SPLITS = {
    "tp": ["tp", "tp-size", "tensor_parallel_size", "tp_size"],
    "dp": ["dp_size", "dp-size", "dp", "data-parallel-size", "--dp-size", "DP_SIZE"],
    "pp": ["pp_size", "pp-size", "pp", "pipeline_parallel_size"],
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


@pytest.mark.parametrize("spelt", [each for names in SPLITS.values() for each in names])
def test_gpus_are_counted_whatever_the_spelling(spelt: str) -> None:
    arguments = named({spelt: "2", "base-gpu-id": "1"})
    assert [first_gpu(arguments, i) for i in range(3)] == [1, 3, 5]


def test_an_engine_has_a_gpu_for_each_part_of_each_stage_of_each_replica() -> None:
    arguments = named({"tp": 2, "pp": 3, "dp": 4, "ep": 2})
    assert n_gpus(arguments) == 24
    assert first_gpu(arguments, 1) == 24


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"enable-dp-attention": True}, "enable_dp_attention cannot be served: replicas"),
        ({"nccl_port": 3}, "nccl_port: the replicas of dp_size meet at a place each"),
        ({"dist-init-addr": "a:3"}, "dist_init_addr: the replicas of dp_size meet"),
    ],
)
def test_replicas_are_whole_and_meet_each_at_its_own_place(
    more: dict[str, object], why: str
) -> None:
    SglangSettings("m", arguments={"dp": 1, **more})
    with pytest.raises(ValueError, match=why):
        SglangSettings("m", arguments={"dp": 2, **more})


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


@pytest.mark.parametrize("name", OF_WHOLE_MODELS)
def test_a_pipeline_has_not_all_that_a_whole_model_has(name: str) -> None:
    SglangSettings("m", arguments={name: "EAGLE", "pp": 1})
    SglangSettings("m", arguments={name: False, "pp": 2})
    with pytest.raises(ValueError, match=f"{name} cannot be served by a pipeline"):
        SglangSettings("m", arguments={name: "EAGLE", "pp": 2})


def test_experts_are_not_moved_and_on_a_cpu_not_split() -> None:
    with pytest.raises(ValueError, match="enable_eplb cannot be served"):
        SglangSettings("m", arguments={"enable-eplb": True})
    split: dict[str, object] = {"tp": 2, "ep": 2}
    SglangSettings("m", arguments=split)
    with pytest.raises(ValueError, match="ep_size: on a CPU"):
        SglangSettings("m", device="cpu", arguments=split)
