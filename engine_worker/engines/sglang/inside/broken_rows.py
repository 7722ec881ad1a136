"""Rows of logits that are no numbers: their requests end alone, where SGLang would end with all.

Weights that are finite may still overflow. Such a row's probabilities are NaN, all of them;
`torch.multinomial` ends a process over them, on a GPU for good. So tokens are drawn without it, and
what tells of a broken row is the logprob of its token, which SGLang brings to the host anyway.
"""

from collections.abc import Callable
from http import HTTPStatus

import torch

from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.types import SglangObject
from rolloutbus.engine_worker.engines.shared.row_rules import BROKEN_ADAPTER, BROKEN_WEIGHTS


def draw_one(
    call: Callable[..., torch.Tensor],
    probs: torch.Tensor,
    sampling_seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token of each row, int32 [rows], with the same chance as `torch.multinomial`.

    It takes the same random numbers, too, but not the two passes that look for NaN.
    """
    if sampling_seed is not None:
        return call(probs, sampling_seed, positions)
    waits = torch.empty_like(probs).exponential_()
    return torch.div(probs, waits, out=waits).argmax(-1).int()


def drawable(probs: torch.Tensor) -> torch.Tensor:
    """`probs` with something to draw from in broken rows; what is drawn there is not used."""
    return probs.nan_to_num(nan=1.0)


def end_broken(batch: SglangObject, result: SglangObject) -> None:
    """Before a step is booked: end the requests whose rows were broken."""
    output = getattr(result, "logits_output", None)
    logprobs: SglangObject = getattr(output, "next_token_logprobs", None)
    if not isinstance(logprobs, torch.Tensor) or logprobs.shape != (len(batch.reqs),):
        return
    is_here = getattr(result, "copy_done", None)
    if is_here is not None:
        is_here.synchronize()
    if not logprobs.isnan().any():
        return
    for row in logprobs.isnan().nonzero()[:, 0].cpu().numpy().tolist():
        request = batch.reqs[row]
        # What a part of a prompt is followed by is drawn and thrown away.
        if request.to_finish is None and not request.inflight_middle_chunks:
            problem = BROKEN_WEIGHTS if request.lora_id is None else BROKEN_ADAPTER
            request.to_finish = upstream.abort_reason(problem.message, HTTPStatus.FAILED_DEPENDENCY)
