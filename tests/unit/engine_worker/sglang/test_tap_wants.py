"""What leaves a scheduler beside tokens: arrays of finished requests, logprobs over the support."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch's stubs leave parameters untyped.

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rolloutbus.bus.wire.codec import numpy_of
from rolloutbus.bus.wire.messages.generation import Want
from rolloutbus.engine_worker.engines.sglang.inside.scheduler_sampling import (
    Support,
    note_support,
    support_of,
)
from rolloutbus.engine_worker.engines.sglang.inside.tap_columns import TapColumns
from rolloutbus.engine_worker.engines.sglang.schedulers.rules import Rules, custom_params
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import Rows, decode, encode


def fake(rid: str, want: Want | None = None, n_kept: int = 0, **more: Any) -> Any:  # noqa: ANN401
    """A request of SGLang's with three tokens, of which nothing was told yet."""
    params = {"top_k": 1 << 30, "top_p": 1.0, "min_p": 0.0}
    said = custom_params(Rules(want=want, n_kept=n_kept)) if want else None
    told = {
        "output_token_logprobs_val": [-1.0, -2.0, -3.0],
        "output_top_logprobs_val": [[-1.0, -2.0]] * 3,
        "output_top_logprobs_idx": [[7, 8]] * 3,
        "output_token_ids_logprobs_val": [[-4.0], [float(np.finfo(np.float32).min)], [-6.0]],
        "input_token_logprobs_val": [None, -0.5, -0.6, -0.7],
        "input_top_logprobs_val": [None, [-0.1, -0.2], [-0.3, -0.4], [-0.5, -0.6]],
        "input_top_logprobs_idx": [None, [1, 2], [3, 4], [5, 6]],
        "input_token_ids_logprobs_val": [None, [-0.9], [-0.8], [-0.7]],
    }
    fields = {
        "rid": rid,
        "origin_input_ids": [1, 2, 3, 4],
        "output_ids": [7, 8, 9],
        "finished_reason": SimpleNamespace(to_json=lambda: {"type": "length"}),
        "finished_len": None,
        "finished_output": None,
        "logprob": SimpleNamespace(**told),
        "sampling_params": SimpleNamespace(custom_params=said, **params),
        "hidden_states": [],
        "routed_experts": None,
        "cached_tokens": 3,
    }

    class Request:
        """Weakly referenced, as SGLang's."""

    request = Request()
    vars(request).update(fields | more)
    return request


def truncating(rid: str, **more: Any) -> Any:  # noqa: ANN401
    """The same, drawn from less than the vocabulary."""
    request = fake(rid, **more)
    request.sampling_params.top_p = 0.9
    return request


def told(*requests: Any) -> Rows:  # noqa: ANN401
    rows = TapColumns(32).step(requests)
    assert rows is not None
    again = decode(encode(rows))
    assert isinstance(again, Rows)
    return again


def arrays(request: Any) -> dict[str, Any]:  # noqa: ANN401
    ((row, found),) = told(request).arrays
    assert row == 0
    return {name: numpy_of(array) for name, array in found.items()}


def test_what_nobody_wanted_is_not_told() -> None:
    rows = told(fake("s1."), fake("c2."))
    assert rows.arrays == []
    assert rows.support_logprobs == b""


def test_top_and_chosen_logprobs_come_as_tables() -> None:
    found = arrays(fake("s1.", Want(top_logprobs=2, logprobs_of=[5])))
    assert found["top_logprobs"].tolist() == [[-1.0, -2.0]] * 3
    assert found["top_token_ids"].tolist() == [[7, 8]] * 3
    assert found["logprobs_of"].tolist() == [[-4.0], [-np.inf], [-6.0]]


def test_prompt_logprobs_end_where_the_kept_tokens_begin() -> None:
    want = Want(prompt_logprobs=True, top_logprobs=2, logprobs_of=[5])
    found = arrays(fake("s1.", want, n_kept=1))
    assert np.isnan(found["prompt_logprobs"][0])
    assert found["prompt_logprobs"][1:].tolist() == pytest.approx([-0.5, -0.6])
    assert found["prompt_top_token_ids"].tolist() == [[-1, -1], [1, 2], [3, 4]]
    assert found["prompt_logprobs_of"][1:, 0].tolist() == pytest.approx([-0.9, -0.8])


def test_prompt_logprobs_from_a_later_token_on_have_no_gap() -> None:
    request = fake("s1.", Want(prompt_logprobs=True, prompt_logprobs_start=2))
    request.logprob.input_token_logprobs_val = [None, -0.6, -0.7]
    assert arrays(request)["prompt_logprobs"].tolist() == pytest.approx([-0.6, -0.7])


def test_hidden_states_of_a_prompt_and_of_tokens_are_rows() -> None:
    states = [[[0.0, 1.0], [2.0, 3.0]], [4.0, 5.0], [6.0, 7.0]]
    full = arrays(fake("s1.", Want(hidden_states="full"), hidden_states=states))
    last = arrays(fake("s1.", Want(hidden_states="last"), hidden_states=states))
    assert full["hidden_states"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert last["hidden_states"].tolist() == [[6, 7]]


def test_routed_experts_are_raw_numbers() -> None:
    experts = torch.arange(12, dtype=torch.int32).reshape(3, 2, 2)
    found = arrays(fake("s1.", Want(routed_experts=True), routed_experts=experts))
    assert found["routed_experts"].tolist() == experts.tolist()
    assert found["routed_experts"].dtype == np.int32


def test_a_token_without_a_mask_was_the_only_choice() -> None:
    masks = [torch.tensor([7, 11], dtype=torch.int32), None]
    greedy = fake("s1.", Want(sampling_mask=True), rolloutbus_masks=masks)
    greedy.sampling_params.top_k = 1
    found = arrays(greedy)
    assert found["sampling_mask"].tolist() == [7, 11, 8, 9]
    assert found["sampling_mask_counts"].tolist() == [2, 1, 1]


def test_a_mask_that_was_not_measured_fails_its_request() -> None:
    masks = [torch.tensor([7, 11], dtype=torch.int32), None]
    rows = told(fake("s1.", Want(sampling_mask=True), rolloutbus_masks=masks))
    ((end,),) = [rows.finishes]
    assert (end.kind, end.status) == ("abort", 500)
    assert "token 1 was not measured" in end.message
    assert rows.arrays == []


def test_what_is_too_large_becomes_the_end_of_its_request() -> None:
    states = [np.zeros((2049, 2048)).tolist()]
    big = fake("s1.", Want(hidden_states="full"), hidden_states=states)
    rows = told(big, fake("s2."))
    assert rows.arrays == []
    assert [(end.kind, end.status) for end in rows.finishes] == [("abort", 413), ("length", 0)]


def test_logprobs_over_the_support_differ_where_something_was_cut() -> None:
    cut = truncating("s1.", rolloutbus_log_mass=[-0.5, -0.25, 0.0])
    rows = told(fake("s2."), cut)
    found = np.frombuffer(rows.support_logprobs, "<f4")
    assert found.tolist() == pytest.approx([-1, -2, -3, -0.5, -1.75, -3])


@pytest.mark.parametrize("known", [{}, {"rolloutbus_log_mass": [-0.5]}])
def test_what_was_truncated_and_not_measured_is_told_as_that(known: dict[str, Any]) -> None:
    rows = told(fake("s2."), truncating("s1.", **known))
    found = np.frombuffer(rows.support_logprobs, "<f4")
    assert found[:3].tolist() == [-1, -2, -3]
    assert np.isnan(found[4:]).all()
    assert np.isnan(found[3]) == (not known)


def test_a_steady_step_tells_what_was_not_measured() -> None:
    requests = [fake("s1."), truncating("s2."), truncating("s3.", rolloutbus_log_mass=[-0.5] * 4)]
    columns = TapColumns(32)
    for request in requests:
        request.finished_reason = None
    columns.step(requests)
    for request in requests:
        request.output_ids.append(10)
        request.logprob.output_token_logprobs_val.append(-4.0)
    rows = columns.step(requests)
    assert rows is not None
    plain, unmeasured, measured = np.frombuffer(rows.support_logprobs, "<f4").tolist()
    assert (plain, measured) == (-4.0, -3.5)
    assert np.isnan(unmeasured)


def test_tokens_without_logprobs_are_told_as_not_measured() -> None:
    request = fake("s1.")
    request.logprob.output_token_logprobs_val = None
    found = np.frombuffer(told(request, fake("s2.")).logprobs, "<f4")
    assert np.isnan(found[:3]).all()
    assert found[3:].tolist() == [-1, -2, -3]


def test_the_support_is_what_sglang_truncates_to() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 4)
    info = SimpleNamespace(
        top_ks=torch.tensor([2, 4, 4, 1]),
        top_ps=torch.tensor([1.0, 0.7, 1.0, 1.0]),
        min_ps=torch.tensor([0.0, 0.0, 0.2, 0.0]),
        need_top_k_sampling=True,
        need_top_p_sampling=True,
        need_min_p_sampling=True,
        custom_params=None,
    )
    support = support_of(probs, info, kernels=None)
    assert support.log_mass.exp().tolist() == pytest.approx([0.8, 0.8, 0.95, 0.5])


def test_a_token_that_was_thrown_away_leaves_its_place_to_the_next_one() -> None:
    request = fake("s1.", output_ids=[7])
    request.sampling_params.top_p = 0.9
    greedy = fake("s2.", output_ids=[7])
    greedy.sampling_params.top_k = 1
    for mass in (-0.3, -0.4):
        note_support(Support(torch.tensor([mass, mass]), {}, None), [request, greedy])
    assert request.rolloutbus_log_mass == pytest.approx([np.nan, -0.4], nan_ok=True)
    assert not hasattr(greedy, "rolloutbus_log_mass")


def test_cached_tokens_are_those_of_the_whole_input() -> None:
    assert arrays(fake("s1.", Want(cached_tokens=True)))["cached_tokens"].tolist() == [3]
