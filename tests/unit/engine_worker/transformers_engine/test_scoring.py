"""Scores of the transformers engine: what a plain forward pass says of the labels."""

import numpy as np
import pytest
import torch

from rolloutbus.engine_worker.engine import EngineBusy
from tests.step_log import StepLog
from tests.tiny_models import TOLERANCE, Build, check_fresh, make_model, prompt, work

LABELS = [5, 9, 11, 5]
QUERY = prompt(4, 1)
ITEMS = [prompt(n, n) for n in (1, 7, 30)]


@torch.no_grad()
def logits(texts: list[np.ndarray[tuple[int], np.dtype[np.int32]]]) -> torch.Tensor:
    model = make_model("llama", 0)
    ids = [torch.as_tensor(text, dtype=torch.int64)[None] for text in texts]
    return torch.stack([model(input_ids=each).logits[0, -1] for each in ids])


@pytest.mark.shows("score")
@pytest.mark.parametrize("item_first", [False, True])
def test_scores_are_those_of_a_plain_forward_pass(build: Build, *, item_first: bool) -> None:
    engine = build()
    texts = [np.concatenate([item, QUERY] if item_first else [QUERY, item]) for item in ITEMS]

    shares = engine.scorer.score(QUERY, ITEMS, LABELS, apply_softmax=True, item_first=item_first)
    logs = engine.scorer.score(QUERY, ITEMS, LABELS, apply_softmax=False, item_first=item_first)

    truth = logits(texts)
    expected = torch.softmax(truth[:, LABELS], -1).numpy()
    np.testing.assert_allclose(shares.scores, expected, atol=TOLERANCE, rtol=0)
    expected = torch.log_softmax(truth, -1)[:, LABELS].numpy()
    np.testing.assert_allclose(logs.scores, expected, atol=TOLERANCE, rtol=0)
    assert shares.n_prompt_tokens == sum(map(len, texts))


def test_a_request_that_runs_meanwhile_is_not_disturbed(build: Build, log: StepLog) -> None:
    engine = build()
    log.hold(3)
    engine.generate([running := work("r", n=30)])
    score = log.call_midway(
        engine,
        lambda: engine.scorer.score(QUERY, ITEMS, LABELS, apply_softmax=True, item_first=False),
    )
    assert score.result().scores.shape == (len(ITEMS), len(LABELS))
    log.wait_finished("r")

    check_fresh(log, running, make_model("llama", 0))


def test_no_labels_no_scores(build: Build) -> None:
    with pytest.raises(ValueError, match="label_token_ids"):
        build().scorer.score(QUERY, ITEMS, [], apply_softmax=True, item_first=False)


def test_torn_weights_score_nothing(build: Build) -> None:
    engine = build()
    engine.overwriter.begin_overwrite("abort")
    with pytest.raises(EngineBusy):
        engine.scorer.score(QUERY, ITEMS, LABELS, apply_softmax=True, item_first=False)
