"""The hooks around sampling in a scheduler process: rules of requests, and what draws tell."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rolloutbus.engine_worker.engines.sglang.inside import grammar_masks
from rolloutbus.engine_worker.engines.sglang.inside.admission import admit, refuse
from rolloutbus.engine_worker.engines.sglang.inside.broken_rows import (
    draw_one,
    drawable,
    end_broken,
)
from rolloutbus.engine_worker.engines.sglang.inside.row_state import place_rows
from rolloutbus.engine_worker.engines.sglang.inside.support import Support, note_support, support_of
from rolloutbus.engine_worker.engines.sglang.upstream import hooks
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.hooks import Hook
from rolloutbus.engine_worker.engines.sglang.upstream.types import SglangObject

Call = Callable[..., Any]


class SchedulerSampling:
    """Of one scheduler process; all on its main thread."""

    def __init__(self) -> None:
        self._support: Support | None = None
        """Of the last draw, until it is with the logits that it was drawn from."""

    def calls(self) -> Sequence[tuple[Hook, Call]]:
        """What is wrapped, and what is called instead."""
        return (
            *grammar_masks.calls(),
            (hooks.SAMPLE, self._sample),
            (hooks.DRAW, self._draw),
            (hooks.DRAW_ONE, draw_one),
            (hooks.COMPUTE_LOGPROBS, _compute_logprobs),
        )

    def admit(self, request: SglangObject) -> None:
        """A request is about to be queued; one that cannot be is ended."""
        try:
            admit(request)
        except Exception as error:  # noqa: BLE001 - SGLang would end with it, and not this request
            refuse(request, repr(error), 500)

    def before_booking(self, batch: SglangObject, result: SglangObject) -> None:
        """Its tokens are about to be given to the requests."""
        output = getattr(result, "logits_output", None)
        support: Support | None = getattr(output, "rolloutbus_support", None)
        if support is not None:
            note_support(support, batch.reqs)
        end_broken(batch, result)

    def _sample(
        self,
        call: Call,
        runner: object,
        logits: SglangObject,
        forward_batch: SglangObject,
        *args: object,
    ) -> object:
        if forward_batch.sampling_info.has_custom_logit_processor:
            place_rows(forward_batch)
        self._support = None
        drawn = call(runner, logits, forward_batch, *args)
        # With a grammar a step is sampled when the one before it was booked: so what was drawn
        # travels with its logits, which are part of its result either way.
        logits.rolloutbus_support, self._support = self._support, None
        return drawn

    def _draw(
        self, call: Call, sampler: object, probs: torch.Tensor, info: SglangObject, *args: object
    ) -> object:
        (*_, is_simple) = args
        drawn = call(sampler, probs if is_simple else drawable(probs), info, *args)
        if not is_simple or info.has_custom_logit_processor:
            self._support = support_of(probs, info, upstream.renormalising_kernels())
        return drawn


def _compute_logprobs(call: Call, *args: object, **kwargs: object) -> SglangObject:
    """Mends what ends SGLang: a batch in which only some requests ask for logprobs of given ids.

    It leaves a list in place of a tensor for the others.
    """
    result: SglangObject = call(*args, **kwargs)
    if result.token_ids_logprobs_val:
        found = result.token_ids_logprobs_val
        result.token_ids_logprobs_val = [
            torch.zeros(0) if isinstance(each, list) else each for each in found
        ]
    return result
