"""How likely labels follow texts, by forward passes of the engine's own model between its steps."""

from collections.abc import Sequence

import numpy as np
import torch

from rolloutbus.engine_worker.engine import Float32s, Int32s, Scores
from rolloutbus.engine_worker.engines.shared.live_weights import LiveWeights
from rolloutbus.engine_worker.engines.shared.step_loop import StepLoop
from rolloutbus.engine_worker.engines.transformers.forward import Forward


class LabelScorer:
    """Implements `Scorer`. A text is one pass; steps of the batch come between them."""

    def __init__(self, forward: Forward, loop: StepLoop, weights: LiveWeights) -> None:
        self._forward = forward
        self._loop = loop
        self._weights = weights

    def score(
        self,
        query: Int32s,
        items: Sequence[Int32s],
        label_token_ids: Sequence[int],
        *,
        apply_softmax: bool,
        item_first: bool,
    ) -> Scores:
        """See `Scorer`. EngineBusy: the weights are asleep, or torn."""
        if not label_token_ids:
            raise ValueError("label_token_ids: a model that generates needs at least one")
        texts = [np.concatenate([item, query] if item_first else [query, item]) for item in items]
        rows = [
            self._loop.call(lambda text=text: self._scored(text, label_token_ids)) for text in texts
        ]
        scores = np.array(rows, np.float32).reshape(len(items), len(label_token_ids))
        if apply_softmax:
            scores = np.exp(scores - np.logaddexp.reduce(scores, axis=1, keepdims=True))
        return Scores(scores, sum(map(len, texts)))

    def _scored(self, text: Int32s, labels: Sequence[int]) -> Float32s:
        """float32 [labels]: logprobs over the whole vocabulary."""
        self._weights.require_usable()
        logits = self._forward.score(text[None].astype(np.int64))[0].float()
        with torch.inference_mode():
            return torch.log_softmax(logits, -1)[list(labels)].cpu().numpy()
