"""The hooks around sampling in a scheduler process: rules of requests, and what draws tell."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine_worker.engines.sglang import upstream
from engine_worker.engines.sglang.inside import grammar_masks
from engine_worker.engines.sglang.inside.admission import admit, refuse
from engine_worker.engines.sglang.inside.broken_rows import draw_one, drawable, end_broken
from engine_worker.engines.sglang.inside.row_state import place_rows
from engine_worker.engines.sglang.inside.support import Support, note_support, support_of
from engine_worker.engines.sglang.upstream_types import SglangObject

Call = Callable[..., Any]


class SchedulerSampling:
    """Of one scheduler process; all on its main thread."""

    def __init__(self) -> None:
        self._support: Support | None = None
        """Of the last draw, until it is with the result of its step."""

    def hooks(self) -> Sequence[tuple[str, Call]]:
        """What is wrapped: (path, hook)."""
        scheduler = "sglang.srt.managers.scheduler.Scheduler"
        return (
            *grammar_masks.hooks(),
            (f"{scheduler}._add_request_to_queue", self._admit),
            (f"{scheduler}.launch_batch_sample_if_needed", self._sample_late),
            ("sglang.srt.model_executor.model_runner.ModelRunner.sample", self._sample),
            ("sglang.srt.layers.sampler.Sampler._sample_from_probs", self._draw),
            ("sglang.srt.layers.sampler.sampling_from_probs_torch", draw_one),
            (
                "sglang.srt.layers.logprob_processor.OutputLogprobProcessor.compute_logprobs",
                _compute_logprobs,
            ),
        )

    def launched(self, result: SglangObject) -> None:
        """A step was launched: what was drawn meanwhile belongs to it."""
        if self._support is not None:
            result.rolloutbus_support, self._support = self._support, None

    def before_booking(self, batch: SglangObject, result: SglangObject) -> None:
        """Its tokens are about to be given to the requests."""
        support: Support | None = getattr(result, "rolloutbus_support", None)
        if support is not None:
            note_support(support, batch.reqs)
        end_broken(batch, result)

    def _admit(
        self, call: Call, scheduler: object, request: SglangObject, *args: object, **kwargs: object
    ) -> object:
        try:
            admit(request)
        except Exception as error:  # noqa: BLE001 - SGLang would end with it, and not this request
            refuse(request, repr(error), 500)
        return call(scheduler, request, *args, **kwargs)

    def _sample(
        self, call: Call, runner: object, logits: object, forward_batch: SglangObject, *args: object
    ) -> object:
        if forward_batch.sampling_info.has_custom_logit_processor:
            place_rows(forward_batch)
        return call(runner, logits, forward_batch, *args)

    def _draw(
        self, call: Call, sampler: object, probs: torch.Tensor, info: SglangObject, *args: object
    ) -> object:
        (*_, is_simple) = args
        drawn = call(sampler, probs if is_simple else drawable(probs), info, *args)
        if not is_simple or info.has_custom_logit_processor:
            self._support = support_of(probs, info, upstream.renormalising_kernels())
        return drawn

    def _sample_late(
        self, call: Call, scheduler: object, result: SglangObject, *args: object
    ) -> object:
        """With a grammar the step before it has to be booked first."""
        done = call(scheduler, result, *args)
        if result is not None:
            self.launched(result)
        return done


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
