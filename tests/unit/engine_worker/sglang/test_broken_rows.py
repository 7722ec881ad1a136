"""Rows that are no numbers are drawn from without harm, and end their requests alone."""

# pyright: reportUnknownMemberType=false
# The stubs of torch leave parameters untyped.

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rolloutbus.engine_worker.engines.sglang.inside.scheduler_sampling import (
    draw_one,
    drawable,
    end_broken,
)
from rolloutbus.engine_worker.engines.sglang.live import problem_of
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.shared.row_rules import BROKEN_ADAPTER, BROKEN_WEIGHTS

N_ROWS, VOCAB_SIZE = 64, 500
NAN = float("nan")


def never(*_: object) -> torch.Tensor:
    raise AssertionError("SGLang's own draw was asked for")


@pytest.fixture
def probs(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N_ROWS, VOCAB_SIZE, generator=generator).mul(3).softmax(-1)


def test_tokens_are_those_of_multinomial(probs: torch.Tensor, seed: int) -> None:
    torch.manual_seed(seed)
    expected = torch.multinomial(probs, 1)[:, 0]
    torch.manual_seed(seed)
    drawn = draw_one(never, probs)
    assert drawn.dtype == torch.int32
    assert drawn.tolist() == expected.tolist()


def test_seeded_rows_are_left_to_sglang(probs: torch.Tensor) -> None:
    seeds, positions = torch.arange(N_ROWS), torch.zeros(N_ROWS)
    expected = torch.arange(N_ROWS)
    assert draw_one(lambda *_: expected, probs, seeds, positions) is expected


def test_a_broken_row_harms_no_other_one(probs: torch.Tensor, seed: int) -> None:
    torch.manual_seed(seed)
    expected = draw_one(never, probs)
    broken = probs.clone()
    broken[3] = NAN
    torch.manual_seed(seed)
    drawn = draw_one(never, broken)
    assert 0 <= int(drawn[3]) < VOCAB_SIZE
    drawn[3] = expected[3]
    assert drawn.tolist() == expected.tolist()
    mended = drawable(broken)
    assert torch.multinomial(mended, 1).shape == (N_ROWS, 1)
    assert torch.equal(mended[4:], probs[4:])


def request(to_finish: object = None, n_chunks: int = 0, lora_id: str | None = None) -> Any:  # noqa: ANN401 - one of SGLang's
    return SimpleNamespace(to_finish=to_finish, inflight_middle_chunks=n_chunks, lora_id=lora_id)


def result(*logprobs: float) -> Any:  # noqa: ANN401 - one of SGLang's
    output = SimpleNamespace(next_token_logprobs=torch.tensor(logprobs))
    return SimpleNamespace(logits_output=output, copy_done=None)


def test_only_requests_of_broken_rows_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(message: str, status: int) -> tuple[str, int]:
        return message, status

    monkeypatch.setattr(upstream, "abort_reason", reason)
    others = [request(), request(to_finish="other"), request(n_chunks=1)]
    broken = [request(), request(lora_id="7")]
    end_broken(SimpleNamespace(reqs=[*others, *broken]), result(-1.0, NAN, NAN, NAN, NAN))
    assert [each.to_finish for each in others] == [None, "other", None]
    told = [problem_of(*each.to_finish) for each in broken]
    assert told == [BROKEN_WEIGHTS, BROKEN_ADAPTER]


def test_a_step_that_tells_no_logprobs_is_left_alone() -> None:
    batch = SimpleNamespace(reqs=[request()])
    for told in (SimpleNamespace(), SimpleNamespace(logits_output=None), result(NAN, NAN)):
        end_broken(batch, told)
    assert batch.reqs[0].to_finish is None
