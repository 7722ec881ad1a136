"""What the built-in logit processors do, and which parameters they take."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch's stubs leave parameters untyped.

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from rolloutbus.bus.wire.messages.generation import Processor
from rolloutbus.engine_worker.engines.shared.processors import (
    LogitProcessor,
    Params,
    Processors,
    SoFar,
    apply,
)

VOCAB = 8
INF = float("inf")


class AddsOne:
    """An operator's processor."""

    def __call__(self, logits: torch.Tensor, so_far: SoFar) -> torch.Tensor:
        return logits + so_far.n_generated


def adds_one(params: Params, vocab_size: int) -> LogitProcessor:
    if params or vocab_size != VOCAB:
        raise ValueError("it takes no parameters")
    return AddsOne()


def fails(params: Params, vocab_size: int) -> LogitProcessor:
    def fail(logits: torch.Tensor, so_far: SoFar) -> torch.Tensor:
        raise RuntimeError(f"{params} {vocab_size} {len(logits)} {so_far.n_generated}")

    return fail


def needs_a_window(params: Params, vocab_size: int) -> LogitProcessor:
    return fails({"window": params["window"]}, vocab_size)


def built(name: str, **params: Any) -> LogitProcessor:  # noqa: ANN401 - also what does not fit
    return Processors({}).build([Processor(name, params)], VOCAB)[0]


def so_far(n_generated: int) -> SoFar:
    return SoFar(n_generated, lambda: ([1, 2], [3] * n_generated))


def after(processor: LogitProcessor, n_generated: int = 0) -> Sequence[float]:
    logits = torch.arange(VOCAB, dtype=torch.float32)
    before = logits.clone()
    changed = processor(logits, so_far(n_generated))
    assert torch.equal(logits, before), "the logits that were given stay as they are"
    return changed.tolist()


def test_an_action_mask_leaves_the_allowed_tokens_only() -> None:
    assert after(built("action_mask", allowed=[2, 5])) == [-INF, -INF, 2, -INF, -INF, 5, -INF, -INF]


def test_an_action_mask_may_fill_with_a_number() -> None:
    mask = built("action_mask", allowed=[0], mask_value=-9)
    assert after(mask) == [0, *[-9] * 7]


def test_disallowed_tokens_are_all_that_goes() -> None:
    blocked = built("disallowed_tokens", blocked=[0, 7])
    assert after(blocked) == [-INF, 1, 2, 3, 4, 5, 6, -INF]
    assert after(built("disallowed_tokens", blocked=[])) == list(range(VOCAB))


@pytest.mark.parametrize(("n", "temperature"), [(0, 2.0), (5, 1.25), (10, 0.5), (99, 0.5)])
def test_a_temperature_schedule_goes_evenly_and_then_stays(n: int, temperature: float) -> None:
    schedule = built("temperature_schedule", initial=2.0, final=0.5, warmup_tokens=10)
    assert after(schedule, n) == pytest.approx([i / temperature for i in range(VOCAB)])


def test_a_schedule_without_warmup_is_at_its_end() -> None:
    schedule = built("temperature_schedule", initial=4, final=2, warmup_tokens=0)
    assert after(schedule) == [i / 2 for i in range(VOCAB)]


@pytest.mark.parametrize(
    ("name", "params", "named"),
    [
        ("action_mask", {}, "allowed"),
        ("action_mask", {"allowed": []}, "allowed"),
        ("action_mask", {"allowed": 3}, "allowed"),
        ("action_mask", {"allowed": [1.5]}, "allowed"),
        ("action_mask", {"allowed": [True]}, "allowed"),
        ("action_mask", {"allowed": [VOCAB]}, "allowed"),
        ("action_mask", {"allowed": [1], "mask_value": float("nan")}, "mask_value"),
        ("action_mask", {"allowed": [1], "mask_value": INF}, "mask_value"),
        ("action_mask", {"allowed": [1], "blocked": [1]}, "blocked"),
        ("disallowed_tokens", {"blocked": [-1]}, "blocked"),
        ("disallowed_tokens", {"blocked": list(range(VOCAB))}, "blocked"),
        ("temperature_schedule", {"initial": 1.0, "final": 1.0}, "warmup_tokens"),
        ("temperature_schedule", {"initial": 0, "final": 1, "warmup_tokens": 1}, "initial"),
        ("temperature_schedule", {"initial": 1, "final": 1e9, "warmup_tokens": 1}, "final"),
        ("temperature_schedule", {"initial": 1, "final": [1], "warmup_tokens": 1}, "final"),
        ("temperature_schedule", {"initial": 1, "final": 1, "warmup_tokens": -1}, "warmup_tokens"),
    ],
)
def test_a_parameter_that_does_not_fit_is_named(
    name: str, params: Mapping[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=f"{name}.*{named}"):
        built(name, **params)


def test_an_unknown_name_tells_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"nothing.*action_mask, disallowed_tokens, temperature"):
        built("nothing")


def test_an_operator_registers_more_by_import_path() -> None:
    known = Processors({"plus": f"{__name__}:adds_one"})
    assert "plus" in known.names
    (plus,) = known.build([Processor("plus")], VOCAB)
    assert after(plus, 3) == [i + 3 for i in range(VOCAB)]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("a", "no_such_module:f"),
        ("a", f"{__name__}:no_such_function"),
        ("a", f"{__name__}:VOCAB"),
        ("a", ""),
        ("action_mask", f"{__name__}:adds_one"),
    ],
)
def test_a_registration_that_leads_nowhere_is_refused_at_the_start(name: str, path: str) -> None:
    with pytest.raises(ValueError, match="processors"):
        Processors({name: path})


def test_a_processor_that_raises_says_so_and_raises_no_further() -> None:
    known = Processors({"broken": f"{__name__}:fails"})
    told = apply(known.build([Processor("broken")], VOCAB), torch.zeros(VOCAB), so_far(0))
    assert isinstance(told, str)
    assert "RuntimeError" in told


def test_a_factory_that_raises_anything_concerns_the_one_who_asked() -> None:
    known = Processors({"window": f"{__name__}:needs_a_window"})
    with pytest.raises(ValueError, match=r"window.*KeyError"):
        known.build([Processor("window")], VOCAB)


def test_what_was_ruled_out_before_stays_so() -> None:
    logits = torch.tensor([-INF, 1.0, 2.0, -INF, 4.0, 5.0, 6.0, 7.0])
    told = apply([built("action_mask", allowed=[1, 3], mask_value=-9)], logits, so_far(0))
    assert isinstance(told, torch.Tensor)
    assert told.tolist() == [-INF, 1, -9, -INF, -9, -9, -9, -9]


def test_a_processor_that_returns_another_size_fails() -> None:
    told = apply(
        [lambda logits, so_far: logits[so_far.n_generated :]], torch.zeros(VOCAB), so_far(3)
    )
    assert isinstance(told, str)
    assert told.startswith("a processor failed: RuntimeError")
