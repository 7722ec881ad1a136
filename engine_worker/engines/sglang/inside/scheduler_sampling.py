"""The hooks around sampling in a scheduler process: rules of requests, and what draws tell.

Weights that are finite may still overflow. Such a row's probabilities are NaN, all of them;
`torch.multinomial` ends a process over them, on a GPU for good. So tokens are drawn without it, and
what tells of a broken row is the logprob of its token, which SGLang brings to the host anyway.

SGLang tells what truncation left only where a request caps the support, and at a price for each
token; here it costs one pass over the probabilities, and only in batches that truncate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import torch

from rolloutbus.engine_worker.engines.sglang.inside.admission import admit, refuse
from rolloutbus.engine_worker.engines.sglang.inside.row_processor import place_rows, state_in
from rolloutbus.engine_worker.engines.sglang.inside.text_stops import NO_TEXTS
from rolloutbus.engine_worker.engines.sglang.upstream import hooks
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.hooks import Call, Hook
from rolloutbus.engine_worker.engines.sglang.upstream.types import SglangObject
from rolloutbus.engine_worker.engines.shared.row_rules import BROKEN_ADAPTER, BROKEN_WEIGHTS


def grammar_calls() -> Sequence[tuple[Hook, Call]]:
    """Hooks for grammars on a CPU: some versions of SGLang end at the first one there.

    xgrammar can do it; without xgrammar there is nothing to be wrapped.
    """
    if not upstream.has_xgrammar():
        return ()
    return (hooks.ALLOCATE_MASK, _allocate_mask), (hooks.APPLY_MASK, _apply_mask)


def _allocate_mask(
    call: Call, grammar: SglangObject, vocab_size: int, batch_size: int, device: object
) -> object:
    if str(device) != "cpu":
        return call(grammar, vocab_size, batch_size, device)
    return upstream.xgrammar().allocate_token_bitmask(batch_size, vocab_size)


def _apply_mask(
    call: Call, grammar: SglangObject, logits: torch.Tensor, vocab_mask: object
) -> None:
    if logits.device.type != "cpu":
        call(grammar, logits, vocab_mask)
    else:
        upstream.xgrammar().apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


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
    """End the requests whose rows were broken, before their step is recorded."""
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


NOT_MEASURED = float("nan")
TOP_K_ALL = 1 << 30
"""What SGLang makes of a top_k that is off; 1 is greedy."""


@dataclass(frozen=True, slots=True)
class Support:
    """Of one step; on its way to the host."""

    log_mass: torch.Tensor
    """float32 [rows]: what the support's probabilities sum up to."""
    masks: Mapping[int, torch.Tensor]
    """Row -> int32 [s], ids in the support, where they are wanted."""
    is_here: torch.cuda.Event | None
    """None: it is on the host already."""


Kernels = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]


def support_of(probs: torch.Tensor, info: SglangObject, kernels: Kernels | None) -> Support:
    """Judge a step that has just drawn from `probs`.

    Args:
        probs: float32 [rows, vocab].
        info: SGLang's sampling parameters of these rows.
        kernels: what renormalises by top_k and by top_p; None: this sorts.
    """
    kept = _kept(probs, info, kernels)
    log_mass = kept.sum(-1, dtype=torch.float64).log().float()
    masks: dict[int, torch.Tensor] = {}
    for row, params in enumerate(info.custom_params or ()):
        state = state_in(params)
        if state is not None and state.rules.want.sampling_mask:
            masks[row] = kept[row].nonzero()[:, 0].int().to("cpu", non_blocking=True)
    on_host, is_here = log_mass.to("cpu", non_blocking=True), None
    if probs.is_cuda:
        is_here = torch.cuda.Event()
        is_here.record()
    return Support(on_host, masks, is_here)


def note_support(support: Support, requests: Sequence[SglangObject]) -> None:
    """Write down what is of use, before the step's tokens are booked."""
    if support.is_here is not None:
        support.is_here.synchronize()
    log_mass: list[float] = support.log_mass.numpy().tolist()
    for row, request in enumerate(requests):
        if truncates(request.sampling_params):
            _put(request, "rolloutbus_log_mass", log_mass[row], NOT_MEASURED)
        if row in support.masks:
            _put(request, "rolloutbus_masks", support.masks[row], None)


def truncates(params: SglangObject) -> bool:
    """Whether SGLang draws this request's tokens from less than the vocabulary, by chance."""
    if params.top_k == 1:
        return False
    return params.top_k < TOP_K_ALL or params.top_p < 1.0 or params.min_p > 0.0


def _put(request: SglangObject, name: str, value: object, filler: object) -> None:
    """The entry of the token that is about to be booked; one thrown away is overwritten."""
    entries: list[object] | None = getattr(request, name, None)
    if entries is None:
        entries = []
        setattr(request, name, entries)
    n = len(request.output_ids)
    del entries[n:]
    entries += [filler] * (n - len(entries))
    entries.append(value)


def _kept(probs: torch.Tensor, info: SglangObject, kernels: Kernels | None) -> torch.Tensor:
    """`probs` with 0 outside of the support, as SGLang's sampler truncates."""
    if not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling):
        return probs
    if kernels is None:
        return _kept_by_sorting(probs, info)
    by_top_k, by_top_p = kernels
    if info.need_min_p_sampling:
        left = by_top_p(by_top_k(probs, info.top_ks), info.top_ps)
    else:
        left = torch.where(by_top_p(probs, info.top_ps) > 0, by_top_k(probs, info.top_ks), 0.0)
    kept = torch.where(left > 0, probs, 0.0)
    least = kept.amax(-1, keepdim=True) * info.min_ps.view(-1, 1)
    return torch.where(kept >= least, kept, 0.0)


def _kept_by_sorting(probs: torch.Tensor, info: SglangObject) -> torch.Tensor:
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    rank = torch.arange(ordered.shape[-1], device=probs.device)
    keep = (rank < info.top_ks.view(-1, 1)) & (before <= info.top_ps.view(-1, 1))
    if info.need_min_p_sampling:
        keep &= ordered >= ordered[:, :1] * info.min_ps.view(-1, 1)
    return torch.zeros_like(probs).scatter_(-1, order, torch.where(keep, ordered, 0.0))


class SchedulerSampling:
    """Of one scheduler process; all on its main thread."""

    def __init__(self) -> None:
        self.texts = NO_TEXTS
        """What makes text of tokens, once the scheduler is built."""
        self._support: Support | None = None
        """Of the last draw, until it is with the logits that it was drawn from."""

    def calls(self) -> Sequence[tuple[Hook, Call]]:
        """What is wrapped, and what is called instead."""
        return (
            *grammar_calls(),
            (hooks.SAMPLE, self._sample),
            (hooks.DRAW, self._draw),
            (hooks.DRAW_ONE, draw_one),
            (hooks.COMPUTE_LOGPROBS, _compute_logprobs),
        )

    def admit(self, request: SglangObject) -> None:
        """A request is about to be queued; one that cannot be is ended."""
        try:
            admit(request, self.texts)
        except Exception as error:  # noqa: BLE001 - SGLang would end with it, and not this request
            refuse(request, repr(error), 500)

    def before_booking(self, batch: SglangObject, result: SglangObject) -> None:
        """Its tokens are about to be given to the requests."""
        output = getattr(result, "logits_output", None)
        support: Support | None = getattr(output, "rolloutbus_support", None)
        if support is None:
            support = getattr(batch, "rolloutbus_support", None)
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
