"""Which tokens of a step leave a scheduler, and as weights of which version.

Pure but for the request objects, which are SGLang's. A request that is streamed leaves its tokens
at every step, another one in portions, so that it can still be resumed elsewhere.
"""

import math
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any

import numpy as np
import torch

from rolloutbus.bus.wire.codec import AnyArray, array_of
from rolloutbus.bus.wire.messages.generation import Array, Want
from rolloutbus.engine_worker.engines.sglang.inside.row_processor import state_of
from rolloutbus.engine_worker.engines.sglang.inside.scheduler_sampling import (
    NOT_MEASURED,
    truncates,
)
from rolloutbus.engine_worker.engines.sglang.inside.version_account import VersionAccount
from rolloutbus.engine_worker.engines.sglang.schedulers.rules import RULES
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import STREAMED, RowFinish, Rows
from rolloutbus.engine_worker.engines.sglang.upstream.types import (
    SchedulerRequest,
    SglangObject,
)

NO_LOGPROB, NO_TOKEN = float("nan"), -1
LEAST = np.finfo(np.float32).min
GREEDY = 1
"""The top_k that SGLang gives to requests without chance."""


def wanted_arrays(request: SglangObject, stop: int) -> dict[str, Array] | None:
    """Arrays of its first `stop` output tokens; None: it wanted nothing.

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
    logprobs, part = request.logprob, slice(0, stop)
    if want.top_logprobs:
        k = want.top_logprobs
        found["top_logprobs"] = _table(logprobs.output_top_logprobs_val[part], k, NO_LOGPROB)
        found["top_token_ids"] = _table(logprobs.output_top_logprobs_idx[part], k, NO_TOKEN)
    if want.logprobs_of:
        rows = logprobs.output_token_ids_logprobs_val[part]
        found["logprobs_of"] = _table(rows, len(want.logprobs_of), NO_LOGPROB)
    if want.prompt_logprobs:
        found |= _of_prompt(
            want, logprobs, len(request.origin_input_ids) - state_of(request).n_kept
        )
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


def _of_prompt(want: Want, logprobs: SglangObject, n_prompt: int) -> dict[str, AnyArray]:
    # One more than wanted comes, unless it is from the beginning; see `requests`.
    skipped = 1 if want.prompt_logprobs_start else 0
    part = slice(skipped, skipped + n_prompt - want.prompt_logprobs_start)
    values = logprobs.input_token_logprobs_val[part]
    found: dict[str, AnyArray] = {"prompt_logprobs": _table([values], len(values), NO_LOGPROB)[0]}
    if k := want.top_logprobs:
        found["prompt_top_logprobs"] = _table(logprobs.input_top_logprobs_val[part], k, NO_LOGPROB)
        found["prompt_top_token_ids"] = _table(logprobs.input_top_logprobs_idx[part], k, NO_TOKEN)
    if c := len(want.logprobs_of):
        rows = logprobs.input_token_ids_logprobs_val[part]
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


class TapColumns:
    """The columns of each step, and the version of the weights that computed it."""

    def __init__(self, coarse_tokens: int) -> None:
        self.version: int | None = None
        """Version of the weights that computed the step; None: it is not known."""
        self.account: VersionAccount | None = None
        """Compares versions when a request ends; None: this SGLang keeps no account of them."""
        self._coarse_tokens = coarse_tokens
        self._steady = SteadyBatch()
        self._quiet = QuietBatch()

    def step(self, requests: Sequence[SchedulerRequest]) -> Rows | None:
        """What is due of these requests after a step; None if nothing is."""
        batch = self._steady
        if batch.has_one_more_each(requests):
            return batch.rows(self.version)
        if self._quiet.has_nothing_due(requests):
            return None
        batch.leave()
        rows = self._rows(requests, self._coarse_tokens)
        if rows is None:
            self._quiet.enter(requests, self._coarse_tokens)
        elif len(rows.rids) == len(requests) and not rows.finishes:
            batch.enter(requests)
        return rows

    def change_version(self, version: int | None, live: Sequence[SchedulerRequest]) -> Rows | None:
        """Note new weights; returns what the `live` requests had not told of the old ones."""
        if version == self.version:
            return None
        self._steady.leave()
        rows = self._rows(live, 1)
        if self.account is not None:
            self.account.change(self.version, live)
        self.version = version
        return rows

    def end(self, requests: Iterable[SchedulerRequest]) -> Rows | None:
        """The rest of requests that are aborted, and their end."""
        self._steady.leave()
        return self._rows(requests, 0, is_end=True)

    def _rows(
        self, requests: Iterable[SchedulerRequest], portion: int, *, is_end: bool = False
    ) -> Rows | None:
        rids: list[str] = []
        counts: list[int] = []
        tokens: list[int] = []
        logprobs: list[float] = []
        finishes: list[RowFinish] = []
        arrays: list[tuple[int, dict[str, Array]]] = []
        cuts: list[tuple[int, Sequence[float]]] = []
        for request in requests:
            reason = request.finished_reason
            if reason is not None and request.finished_output:
                continue  # with overlapped scheduling a request is shown again after its end
            start: int = getattr(request, "rolloutbus_told", 0)
            stop = len(request.output_ids)
            if reason is None:
                n_new = stop - start
                if is_end:
                    finishes.append(RowFinish(len(rids), "abort"))
                    stop = self._trusted(request, start, stop, finishes)
                elif n_new < portion and not (n_new and request.rid.startswith(STREAMED)):
                    continue
            else:
                if request.finished_len is not None:
                    stop = request.finished_len
                finishes.append(_finish(len(rids), reason))
                if finishes[-1].status and _is_broken(request, stop):
                    stop -= 1
                stop = self._trusted(request, start, stop, finishes)
                if not finishes[-1].status and request.sampling_params.custom_params:
                    finishes[-1] = _with_arrays(request, stop, finishes[-1], arrays)
            if truncates(request.sampling_params):
                cut: Sequence[float] = getattr(request, "rolloutbus_log_mass", ())
                cuts.append((len(logprobs), _filled(cut, start, stop)))
            request.rolloutbus_told = stop
            rids.append(request.rid)
            counts.append(stop - start)
            tokens += request.output_ids[start:stop]
            logprobs += _filled(request.logprob.output_token_logprobs_val or (), start, stop)
        if not rids:
            return None
        return Rows(
            version=self.version,
            rids=rids,
            counts=counts,
            tokens=np.array(tokens, "<i4").tobytes(),
            logprobs=np.array(logprobs, "<f4").tobytes(),
            finishes=finishes,
            support_logprobs=_support_logprobs(logprobs, cuts),
            arrays=arrays,
        )

    def _trusted(
        self, request: SchedulerRequest, start: int, stop: int, finishes: list[RowFinish]
    ) -> int:
        """`stop`; `start` if nothing more may be told, which makes its end, the last, an error."""
        end = finishes[-1]
        if self.account is None or end.status:
            return stop
        problem = self.account.problem_of(request, self.version, stop)
        if not problem:
            return stop
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        finishes[-1] = RowFinish(end.row, "abort", problem, status)
        return start


class SteadyBatch:
    """The usual step: the same requests as before, all streamed, each with one token more.

    A scheduler does nothing else meanwhile, so for small models this is time that the GPU waits.
    """

    def __init__(self) -> None:
        self._requests: list[SchedulerRequest] = []
        self._rids: list[str] = []
        self._lengths: list[int] = []
        """Tokens of each after the next step, if it is a usual one."""
        self._truncating: list[bool] = []

    def enter(self, requests: Sequence[SchedulerRequest]) -> None:
        """All tokens of these requests have just been sent."""
        if all(request.rid.startswith(STREAMED) for request in requests):
            self._requests = [*requests]
            self._rids = [request.rid for request in requests]
            self._lengths = [len(request.output_ids) + 1 for request in requests]
            self._truncating = [truncates(request.sampling_params) for request in requests]

    def leave(self) -> None:
        """Another kind of step follows."""
        for request, length in zip(self._requests, self._lengths, strict=True):
            request.rolloutbus_told = length - 1
        self._requests = []
        self._lengths = []

    def has_one_more_each(self, requests: Sequence[SchedulerRequest]) -> bool:
        """Whether this step is such a one."""
        return (
            bool(self._requests)
            and self._requests == requests
            and self._lengths == [len(request.output_ids) for request in requests]
            and not [request for request in requests if request.finished_reason is not None]
        )

    def rows(self, version: int | None) -> Rows:
        """Tell it."""
        requests = self._requests
        tokens = [request.output_ids[-1] for request in requests]
        logprobs = [
            _at(request.logprob.output_token_logprobs_val or (), length)
            for request, length in zip(requests, self._lengths, strict=True)
        ]
        cuts: list[tuple[int, Sequence[float]]] = []
        for row, truncating in enumerate(self._truncating):
            if truncating:
                mass: Sequence[float] = getattr(requests[row], "rolloutbus_log_mass", ())
                cuts.append((row, (_at(mass, self._lengths[row]),)))
        self._lengths = [length + 1 for length in self._lengths]
        return Rows(
            version=version,
            rids=self._rids,
            counts=[1] * len(requests),
            tokens=np.array(tokens, "<i4").tobytes(),
            logprobs=np.array(logprobs, "<f4").tobytes(),
            finishes=[],
            support_logprobs=_support_logprobs(logprobs, cuts),
        )


class QuietBatch:
    """Steps of which nothing is sent: the same requests, none streamed, and no portion is full.

    The longest portion sets the pace for all: a step that yields several tokens, as speculation
    does, makes portions longer by as many.
    """

    def __init__(self) -> None:
        self._requests: list[SchedulerRequest] = []
        self._n_left = 0

    def enter(self, requests: Sequence[SchedulerRequest], portion: int) -> None:
        """Nothing was due of these after this step; something will be at a portion's end."""
        if any(request.rid.startswith(STREAMED) for request in requests):
            return
        starts = (getattr(each, "rolloutbus_told", 0) for each in requests)
        n_kept = max(
            (len(each.output_ids) - start for each, start in zip(requests, starts, strict=True)),
            default=portion,
        )
        self._requests, self._n_left = [*requests], portion - n_kept - 1

    def has_nothing_due(self, requests: Sequence[SchedulerRequest]) -> bool:
        """Whether this step is another such one."""
        if (
            self._n_left <= 0
            or self._requests != requests
            or [request for request in requests if request.finished_reason is not None]
        ):
            self._requests = []
            return False
        self._n_left -= 1
        return True


def _filled(known: Sequence[float], start: int, stop: int) -> list[float]:
    """What is known of the tokens [start, stop), and that the rest was not measured."""
    found = [*known[start:stop]]
    return found + [NOT_MEASURED] * (stop - start - len(found))


def _at(known: Sequence[float], n_tokens: int) -> float:
    """What is known of the last of so many tokens."""
    return known[n_tokens - 1] if len(known) >= n_tokens else NOT_MEASURED


def _support_logprobs(
    logprobs: Sequence[float], cuts: Sequence[tuple[int, Sequence[float]]]
) -> bytes:
    """Logprobs over what truncation left; NaN where that was not measured.

    `cuts`: (place, log of what it left) of the tokens of requests that truncate.
    """
    if not cuts:
        return b""
    column = np.array(logprobs, np.float64)
    for at, log_mass in cuts:
        column[at : at + len(log_mass)] -= log_mass
    return column.astype("<f4").tobytes()


def _with_arrays(
    request: SchedulerRequest, stop: int, end: RowFinish, arrays: list[tuple[int, dict[str, Array]]]
) -> RowFinish:
    """Add what the request wanted to `arrays`; its end, which is another one if it cannot be had.

    Nothing may be raised: SGLang would end with it.
    """
    try:
        found = wanted_arrays(request, stop)
    except ValueError as error:
        return RowFinish(end.row, "abort", str(error), HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    except Exception as error:  # noqa: BLE001 - as above
        return RowFinish(end.row, "abort", repr(error)[:500], HTTPStatus.INTERNAL_SERVER_ERROR)
    if found:
        arrays.append((end.row, found))
    return end


def _is_broken(request: SchedulerRequest, stop: int) -> bool:
    """Whether the last token was drawn from no numbers at all."""
    known: Sequence[float] = request.logprob.output_token_logprobs_val or ()
    return 0 < stop <= len(known) and math.isnan(known[stop - 1])


def _finish(row: int, reason: SglangObject) -> RowFinish:
    json = reason.to_json()
    status = json.get("status_code")
    kind, message = str(json["type"]), str(json.get("message", ""))
    if json.get("matched") == "NaN happened":
        kind, message, status = "abort", "the logits held NaN", 500
    return RowFinish(row, kind, message, int(status) if isinstance(status, int) else 0)
