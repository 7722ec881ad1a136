"""What truncation left of each row's distribution, told beside the tokens drawn from it.

SGLang tells it only where a request caps the support, and at a price for each token; here it costs
one pass over the probabilities, and only in batches that truncate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rolloutbus.engine_worker.engines.sglang.inside.row_state import state_in
from rolloutbus.engine_worker.engines.sglang.upstream.types import SglangObject

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
