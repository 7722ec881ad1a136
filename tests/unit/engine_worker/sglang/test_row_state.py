"""What a scheduler process knows of a request's own tokens when the next one is sampled."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch's stubs leave parameters untyped.

import weakref
from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from rolloutbus.engine_worker.engines.sglang.inside.row_processor import (
    WITHIN,
    RowProcessor,
    RowState,
    place_rows,
    state_of,
)
from rolloutbus.engine_worker.engines.sglang.schedulers.rules import (
    REQUEST,
    Penalties,
    Rules,
    custom_params,
)

VOCAB = 12
PENALISED = Rules(penalties=Penalties(frequency=1.0))


@dataclass(eq=False)
class FakeRequest:
    """The attributes of SGLang's request that are looked at."""

    prompt: list[int]
    rules: Rules = PENALISED
    output_ids: Any = field(default_factory=lambda: array("q"))
    to_finish: object = None
    sampling_params: Any = None

    def __post_init__(self) -> None:
        self.origin_input_ids = array("q", self.prompt)
        params = {**custom_params(self.rules), REQUEST: weakref.proxy(self)}
        self.sampling_params = SimpleNamespace(custom_params=params)

    @property
    def params(self) -> dict[str, object]:
        found: dict[str, object] = self.sampling_params.custom_params
        return found


def step(requests: list[FakeRequest], fed: list[list[int]], lengths: list[int]) -> None:
    """A forward pass over these tokens of each, of which it then has so many."""
    is_decode = all(len(tokens) == 1 for tokens in fed)
    place_rows(
        SimpleNamespace(
            sampling_info=SimpleNamespace(custom_params=[request.params for request in requests]),
            input_ids=torch.tensor([token for tokens in fed for token in tokens]),
            seq_lens_cpu=torch.tensor(lengths),
            forward_mode=SimpleNamespace(is_decode=lambda: is_decode),
            extend_seq_lens_cpu=[len(tokens) for tokens in fed],
        )
    )


def counts(request: FakeRequest) -> list[int]:
    n_times, _ = state_of(request).history(torch.zeros(VOCAB))
    told = n_times.tolist()
    assert told == once(*state_of(request).so_far().generated), "as processors see it"
    return told


def once(*tokens: int) -> list[int]:
    return [tokens.count(token) for token in range(VOCAB)]


def test_tokens_are_counted_though_they_are_booked_one_step_late() -> None:
    request = FakeRequest([1, 2, 3])
    step([request], [[1, 2, 3]], [3])
    assert (state_of(request).n_generated, counts(request)) == (0, once())
    step([request], [[7]], [4])  # 7 was sampled, and output_ids has not got it yet
    assert (state_of(request).n_generated, counts(request)) == (1, once(7))
    request.output_ids.append(7)
    step([request], [[8]], [5])
    request.output_ids.append(8)
    assert (state_of(request).n_generated, counts(request)) == (2, once(7, 8))


def test_a_request_that_was_dropped_from_the_cache_counts_what_was_booked_only() -> None:
    request = FakeRequest([1, 2])
    step([request], [[1, 2]], [2])
    counts(request)
    request.output_ids.append(5)
    step([request], [[5]], [3])
    step([request], [[6]], [4])  # 6 is thrown away with the cache
    step([request], [[1, 2, 5]], [3])
    assert (state_of(request).n_generated, counts(request)) == (1, once(5))
    request.output_ids.append(9)
    step([request], [[9]], [4])
    assert counts(request) == once(5, 9)


def test_kept_tokens_count_though_sglang_takes_them_for_the_prompt() -> None:
    request = FakeRequest([1, 2, 4, 4], Rules(n_kept=2, penalties=Penalties(presence=1.0)))
    step([request], [[1, 2, 4, 4]], [4])
    assert (state_of(request).n_generated, counts(request)) == (2, once(4, 4))


def test_a_part_of_a_prompt_samples_nothing() -> None:
    request = FakeRequest([1, 2, 4, 4], Rules(n_kept=2, penalties=Penalties(presence=1.0)))
    step([request], [[1, 2, 4]], [3])
    assert state_of(request).n_generated == WITHIN
    step([request], [[4]], [4])
    assert (state_of(request).n_generated, counts(request)) == (2, once(4, 4))


def test_ids_beyond_the_vocabulary_are_passed_over() -> None:
    request = FakeRequest([1, 10**9, 2])
    step([request], [[1, 10**9, 2]], [3])
    _, seen = state_of(request).history(torch.zeros(VOCAB))
    assert seen.nonzero()[:, 0].tolist() == [1, 2]


def test_rows_of_a_batch_each_have_their_own_rules() -> None:
    requests = [
        FakeRequest([1, 2], PENALISED),
        FakeRequest([1], Rules(min_new_tokens=2, end_ids=(11,))),
        FakeRequest(
            [1],
            Rules(
                processors=(
                    (
                        "rolloutbus.engine_worker.engines.shared.processors:action_mask",
                        {"allowed": [3]},
                    ),
                )
            ),
        ),
    ]
    step(requests, [[1, 2], [1], [1]], [2, 1, 1])
    step(requests, [[5], [5], [5]], [3, 2, 2])
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(3, 1)
    shaped = RowProcessor()(logits, [request.params for request in requests])
    penalised, longer, masked = shaped.tolist()
    assert penalised == [0, 1, 2, 3, 4, 4, 6, 7, 8, 9, 10, 11]
    assert longer[:11] == list(range(11))
    assert longer[11] == -torch.inf
    assert [token for token in range(VOCAB) if masked[token] > -torch.inf] == [3]
    assert logits.tolist() == [list(range(VOCAB))] * 3, "they are SGLang's"


def test_a_request_is_let_go_with_its_state() -> None:
    request = FakeRequest([1])
    step([request], [[1]], [1])
    state, gone = state_of(request), weakref.ref(request)
    assert isinstance(state, RowState)
    del request
    assert gone() is None
