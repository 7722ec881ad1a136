"""What a finished request wanted to be told besides its tokens, from SGLang's request object."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rolloutbus.bus.wire.arrays import AnyArray, array_of
from rolloutbus.bus.wire.messages.array import Array
from rolloutbus.bus.wire.messages.generation import Want
from rolloutbus.engine_worker.engines.sglang.inside.row_state import state_of
from rolloutbus.engine_worker.engines.sglang.schedulers.rules import RULES
from rolloutbus.engine_worker.engines.sglang.upstream.types import SglangObject

NO_LOGPROB, NO_TOKEN = float("nan"), -1
LEAST = np.finfo(np.float32).min
GREEDY = 1
"""The top_k that SGLang gives to requests without chance."""


def wanted_arrays(request: SglangObject, start: int, stop: int) -> dict[str, Array] | None:
    """Arrays of its output tokens [start, stop); None: it wanted nothing.

    See docs/protocol.md, "Arrays".

    Raises:
        ValueError: one is too large.
        LookupError: one was not measured.
    """
    params = request.sampling_params.custom_params
    if not params or RULES not in params:
        return None
    want = state_of(request).rules.want
    found: dict[str, AnyArray] = {}
    told, part = request.logprob, slice(start, stop)
    if want.top_logprobs:
        k = want.top_logprobs
        found["top_logprobs"] = _table(told.output_top_logprobs_val[part], k, NO_LOGPROB)
        found["top_token_ids"] = _table(told.output_top_logprobs_idx[part], k, NO_TOKEN)
    if want.logprobs_of:
        rows = told.output_token_ids_logprobs_val[part]
        found["logprobs_of"] = _table(rows, len(want.logprobs_of), NO_LOGPROB)
    if want.prompt_logprobs:
        found |= _of_prompt(want, told, len(request.origin_input_ids) - state_of(request).n_kept)
    if want.hidden_states and request.hidden_states:
        found["hidden_states"] = _hidden(want, request, stop)
    if want.routed_experts and request.routed_experts is not None:
        found["routed_experts"] = torch.as_tensor(request.routed_experts).int().cpu().numpy()
    if want.sampling_mask:
        is_greedy = request.sampling_params.top_k == GREEDY
        masks = getattr(request, "rolloutbus_masks", [])
        found |= _masks(masks, request.output_ids, part, is_greedy=is_greedy)
    if want.cached_tokens:
        found["cached_tokens"] = np.array([request.cached_tokens], np.int32)
    return {name: array_of(values) for name, values in found.items()} or None


def _of_prompt(want: Want, told: SglangObject, n_prompt: int) -> dict[str, AnyArray]:
    # One more than wanted comes, unless it is from the beginning; see `requests`.
    skipped = 1 if want.prompt_logprobs_start else 0
    part = slice(skipped, skipped + n_prompt - want.prompt_logprobs_start)
    values = told.input_token_logprobs_val[part]
    found: dict[str, AnyArray] = {"prompt_logprobs": _table([values], len(values), NO_LOGPROB)[0]}
    if k := want.top_logprobs:
        found["prompt_top_logprobs"] = _table(told.input_top_logprobs_val[part], k, NO_LOGPROB)
        found["prompt_top_token_ids"] = _table(told.input_top_logprobs_idx[part], k, NO_TOKEN)
    if c := len(want.logprobs_of):
        rows = told.input_token_ids_logprobs_val[part]
        found["prompt_logprobs_of"] = _table(rows, c, NO_LOGPROB)
    return found


def _hidden(want: Want, request: SglangObject, stop: int) -> AnyArray:
    """float32 [rows, d]; a prompt comes as a list of rows, or as its last one."""
    rows: list[Any] = []
    for entry in request.hidden_states:
        if isinstance(entry, list) and entry and isinstance(entry[0], list):
            rows += entry
        else:
            rows.append(entry)
    if want.hidden_states == "last":
        return np.array(rows[-1:], np.float32)
    return np.array(rows[: len(rows) - (len(request.output_ids) - stop)], np.float32)


def _masks(
    masks: Sequence[torch.Tensor | None], tokens: Sequence[int], part: slice, *, is_greedy: bool
) -> dict[str, AnyArray]:
    """Of a greedy request, a token without a mask was the likeliest one."""
    ids: list[AnyArray] = []
    for i in range(part.start, part.stop):
        mask = masks[i] if i < len(masks) else None
        if mask is None and not is_greedy:
            raise LookupError(f"the sampling mask of token {i} was not measured")
        ids.append(np.array([tokens[i]], np.int32) if mask is None else mask.numpy())
    return {
        "sampling_mask": np.concatenate([np.zeros(0, np.int32), *ids]),
        "sampling_mask_counts": np.array([len(each) for each in ids], np.int32),
    }


def _table(rows: Sequence[Sequence[Any] | None], width: int, filler: float) -> AnyArray:
    """[n, width], float32 or int32 as the filler says; a row or a number that is None is filler."""
    dtype = np.int32 if isinstance(filler, int) else np.float32
    table = np.full((len(rows), width), filler, dtype)
    for i, row in enumerate(rows):
        if row is not None:
            known = [filler if value is None else value for value in row[:width]]
            table[i, : len(known)] = known
    if dtype == np.float32:
        table[table <= LEAST] = -np.inf  # SGLang's stand-in for it
    return table
