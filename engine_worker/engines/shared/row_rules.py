"""Rules of single requests in a batch: penalties, bias, processors, and details of tokens."""

from collections.abc import Mapping

import numpy as np
import torch

from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Want
from rolloutbus.engine_worker.engine import Int32s
from rolloutbus.engine_worker.engines.shared.processors import SoFar, apply
from rolloutbus.engine_worker.engines.shared.request import (
    NO_FLOATS,
    NO_IDS,
    EngineRequest,
    TokenDetails,
)


def penalised(
    logits: torch.Tensor, counts: torch.Tensor, seen: torch.Tensor, penalties: torch.Tensor
) -> torch.Tensor:
    """Logits after the repetition penalty, then the frequency and presence penalties.

    Args:
        logits: float32 [n, vocab].
        counts: int [n, vocab], how often each token was generated.
        seen: bool [n, vocab], whether it is in the prompt or was generated.
        penalties: float32 [n, 3]: repetition, frequency, presence.
    """
    repetition, frequency, presence = (penalties[:, i : i + 1] for i in range(3))
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    scaled = torch.where(seen, repeated, logits)
    return scaled - frequency * counts - presence * (counts > 0)


Slots = np.ndarray[tuple[int], np.dtype[np.int64]]
MAX_LOGIT = 1e30
"""The likeliest token's: the lowest temperature makes a million times as much of it."""
NOTHING_LEFT = (
    "its processors, with its other rules, leave no token to sample, or one whose logit is beyond "
    f"{MAX_LOGIT:g}"
)


class RowRules:
    """Rules by slot, of the few requests that have any."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._processed: dict[int, EngineRequest] = {}
        self._wants: dict[int, Want] = {}
        self._guarded: set[int] = set()
        """Slots whose rules can leave no token."""
        self._greedy: set[int] = set()

    def enter(self, slot: int, request: EngineRequest) -> None:
        """Set `slot` up for `request`."""
        self._leave(slot)
        if bias := request.sampling.logit_bias:
            ids = torch.tensor(list(bias), dtype=torch.int64, device=self._device)
            values = torch.tensor(list(bias.values()), dtype=torch.float32, device=self._device)
            self._bias[slot] = ids, values
        if request.processors:
            self._processed[slot] = request
        if request.processors or request.sampling.min_new_tokens:
            self._guarded.add(slot)
        if request.wanted is not None:
            self._wants[slot] = request.wanted.want
        if request.sampling.temperature == 0.0:
            self._greedy.add(slot)

    def bias(self, scores: torch.Tensor, slots: Slots) -> None:
        """Add the bias of each row to its scores, float32 [n, vocab]."""
        for row in _rows_in(self._bias, slots):
            ids, values = self._bias[int(slots[row])]
            scores[row, ids] += values

    def process(self, scores: torch.Tensor, slots: Slots) -> Mapping[int, Problem]:
        """Apply the processors of each row; row -> why it failed.

        A failed row is left such that a draw from it does no harm.

        Args:
            scores: float32 [n, vocab], overwritten.
            slots: int64 [n].
        """
        failed: dict[int, Problem] = {}
        for row in _rows_in(self._guarded, slots):
            slot = int(slots[row])
            if bool(scores[row].isnan().any()):
                continue  # the model's doing, not the request's
            done = self._processed_row(slot, scores[row])
            if not isinstance(done, str) and bool(done.max().abs() <= MAX_LOGIT):
                scores[row] = done
                continue
            failed[row] = cannot_sample(done if isinstance(done, str) else NOTHING_LEFT)
            scores[row] = 0.0
        return failed

    def wanted(
        self, logprobs: torch.Tensor, probs: torch.Tensor | None, tokens: Int32s, slots: Slots
    ) -> Mapping[int, TokenDetails]:
        """Details of the token of each row that wants them.

        Args:
            logprobs: float32 [n, vocab].
            probs: [n, vocab], 0 outside of the support; None: each row took the likeliest.
            tokens: int32 [n].
            slots: int64 [n].
        """
        found: dict[int, TokenDetails] = {}
        for row in _rows_in(self._wants, slots):
            slot = int(slots[row])
            support = None if probs is None or slot in self._greedy else probs[row]
            found[row] = _wanted(self._wants[slot], logprobs[row], support, int(tokens[row]))
        return found

    def _processed_row(self, slot: int, scores: torch.Tensor) -> torch.Tensor | str:
        request = self._processed.get(slot)
        if request is None:
            return scores
        tokens = request.tokens
        so_far = SoFar(len(tokens), lambda: (request.prompt.tolist(), list(tokens)))
        return apply(request.processors, scores, so_far)

    def _leave(self, slot: int) -> None:
        self._bias.pop(slot, None)
        self._processed.pop(slot, None)
        self._wants.pop(slot, None)
        self._guarded.discard(slot)
        self._greedy.discard(slot)


BROKEN_WEIGHTS = Problem(
    "broken_weights",
    "The logits are no numbers: these weights overflow, or are broken; publish others.",
    "failed",
)
"""The end of a request whose next token has no distribution."""
BROKEN_ADAPTER = Problem(
    "broken_weights",
    "The logits are no numbers: this adapter, or the weights below it, overflow or are broken.",
    "failed",
    field="lora",
)
"""The same of a request with an adapter."""


def cannot_sample(why: str) -> Problem:
    """Builds the ending of a request whose sampling rules failed."""
    return Problem("bad_request", f"Nothing can be sampled: {why}.", "failed", field="processors")


def _rows_in(rules: "Mapping[int, object] | set[int]", slots: Slots) -> list[int]:
    return [row for row, slot in enumerate(slots.tolist()) if slot in rules] if rules else []


def _wanted(
    want: Want, logprobs: torch.Tensor, support: torch.Tensor | None, token: int
) -> TokenDetails:
    top, ids, of, kept = NO_FLOATS, NO_IDS, NO_FLOATS, NO_IDS
    if want.top_logprobs:
        best = logprobs.topk(want.top_logprobs)
        top, ids = best.values.cpu().numpy(), best.indices.cpu().numpy().astype(np.int32)
    if want.logprobs_of:
        of = logprobs[torch.tensor(want.logprobs_of, device=logprobs.device)].cpu().numpy()
    if want.sampling_mask:
        kept = np.array([token], np.int32)
        if support is not None:
            kept = support.nonzero()[:, 0].cpu().numpy().astype(np.int32)
    return TokenDetails(top, ids, of, kept)
