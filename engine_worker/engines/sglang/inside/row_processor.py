"""Inside SGLang's sampler: penalties, minimal length and processors of single requests.

SGLang's own penalties forget what was generated when a request is resumed or retracted, and are one
token late with overlapped scheduling; those here are right, and the same as of other engines. With
overlapped scheduling a step is launched before the token of the last one has been booked: then
`output_ids` lags, so the number of tokens comes from the length of the sequence, and the last token
from the device.
"""

import weakref
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Protocol, cast

import torch

from rolloutbus.engine_worker.engines.sglang.schedulers.rules import (
    NO_PENALTIES,
    REQUEST,
    RULES,
    Rules,
    rules_in,
)
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.types import SglangObject
from rolloutbus.engine_worker.engines.shared.processors import (
    LogitProcessor,
    SoFar,
    apply,
    factory_at,
)
from rolloutbus.engine_worker.engines.shared.row_rules import MAX_LOGIT, NOTHING_LEFT, penalised

WITHIN = -1
"""In place of a number of tokens: the step computes a part of what is known, and samples nothing
that is kept."""


History = tuple[torch.Tensor, torch.Tensor]
"""Of each token how often it was generated int32 [vocab], and whether it is known bool [vocab]."""


class SglangRequest(Protocol):
    """The part of SGLang's request that is read here."""

    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    to_finish: object
    rolloutbus_state: "RowState"
    """Ours. Not there before the first look."""


class RowState:
    """Rules of one request, and how far it is."""

    def __init__(self, rules: Rules, request: SglangRequest) -> None:
        self.rules = rules
        self.n_generated = WITHIN
        """Tokens before the one that is about to be sampled, or `WITHIN`."""
        self.n_kept = rules.n_kept
        """Generated tokens among `origin_input_ids`."""
        self._request = request
        self._processors: list[LogitProcessor] | None = None
        self._history: History | None = None
        self._last = torch.zeros(0)

    def place(self, n_tokens: int, n_fed: int, last: torch.Tensor) -> None:
        """A step is about to sample for this request.

        Args:
            n_tokens: of its sequence, those that this step computes included.
            n_fed: that this step computes.
            last: int [1], on the device: the last of them.
        """
        n = n_tokens - len(self._request.origin_input_ids) + self.n_kept
        if n < self.n_kept + len(self._request.output_ids):
            n = WITHIN
        goes_on = n_fed == 1 and n == self.n_generated + 1
        self.n_generated, self._last = n, last
        if not goes_on:
            self._history = None  # it began, or begins again after its cache was dropped
        elif self._history is not None:
            _count(self._history, last)

    def history(self, like: torch.Tensor) -> History:
        """What was generated so far, on the device of `like`, float32 [vocab]."""
        if self._history is None:
            self._history = self._counted(like.shape[-1], like.device)
            if self._is_behind():
                _count(self._history, self._last)
        return self._history

    def so_far(self) -> SoFar:
        """What processors see."""
        return SoFar(self.n_generated, self._all)

    def processors(self, vocab_size: int) -> Sequence[LogitProcessor]:
        """Made when first used."""
        if self._processors is None:
            asked = self.rules.processors
            self._processors = [factory_at(path)(params, vocab_size) for path, params in asked]
        return self._processors

    def give_up(self, reason: object) -> None:
        """End the request, which cannot be sampled for, with one of SGLang's finish reasons."""
        self._request.to_finish = reason

    def _is_behind(self) -> bool:
        """Whether the last token is not booked yet, so that only the device knows it."""
        return self.n_generated - self.n_kept > len(self._request.output_ids)

    def _booked(self) -> tuple[list[int], list[int]]:
        """The prompt, and the generated tokens that are booked."""
        given = list(self._request.origin_input_ids)
        # A sampled token that was thrown away with the cache may still be booked: go no further.
        n_own = max(0, self.n_generated - self.n_kept)
        first = len(given) - self.n_kept
        return given[:first], [*given[first:], *self._request.output_ids[:n_own]]

    def _all(self) -> tuple[list[int], list[int]]:
        """The prompt, and all generated tokens."""
        prompt, generated = self._booked()
        return prompt, [*generated, int(self._last)] if self._is_behind() else generated

    def _counted(self, size: int, device: torch.device) -> History:
        prompt, generated = self._booked()
        # Multimodal prompts hold ids beyond the vocabulary.
        known = torch.tensor([t for t in (*prompt, *generated) if 0 <= t < size], dtype=torch.int64)
        counts = torch.bincount(torch.tensor(generated, dtype=torch.int64), minlength=size)
        seen = torch.zeros(size, dtype=torch.bool)
        seen[known] = True
        return counts.to(device, torch.int32), seen.to(device)


def _count(history: History, token: torch.Tensor) -> None:
    """Count one more, int [1], without asking the device which one it is."""
    counts, seen = history
    place = token.long()
    counts.index_add_(0, place, torch.ones_like(place, dtype=counts.dtype))
    seen.index_fill_(0, place, value=True)


def state_of(request: SglangObject) -> RowState:
    """State of a request, made when it is first looked at."""
    state: RowState | None = getattr(request, "rolloutbus_state", None)
    if state is None:
        # A request that is gone must not wait for the garbage collector, which SGLang may stop.
        is_weak = isinstance(request, weakref.ProxyType)
        held = cast("SglangRequest", request if is_weak else weakref.proxy(request))
        state = RowState(rules_in(request.sampling_params.custom_params), held)
        request.rolloutbus_state = state
    return state


def state_in(params: SglangObject) -> RowState | None:
    """State of the request with these `custom_params`; None: it has no rules."""
    return state_of(params[REQUEST]) if params and RULES in params else None


def place_rows(forward_batch: SglangObject) -> None:
    """Tell each request with rules what the step is that samples next."""
    rows = forward_batch.sampling_info.custom_params or ()
    states = [state_in(params) for params in rows]
    if not any(states):
        return
    tokens, lengths = forward_batch.input_ids, forward_batch.seq_lens_cpu.tolist()
    is_decode = forward_batch.forward_mode.is_decode()
    fed = [1] * len(rows) if is_decode else list(forward_batch.extend_seq_lens_cpu)
    end = 0
    for row, state in enumerate(states):
        end += fed[row]
        if state is not None:
            state.place(lengths[row], fed[row], tokens[end - 1 : end])


class RowProcessor:
    """What SGLang calls for the rows of a batch that have rules; rows may differ in them."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Sequence[Any]) -> torch.Tensor:
        """Logits to sample from, float32 [rows, vocab]; never raises, which would end SGLang."""
        states = [state_in(params) for params in custom_param_list]
        try:
            return _shaped(logits, [state for state in states if state is not None])
        except Exception as error:  # noqa: BLE001 - as above; these requests end, others do not
            for state in states:
                if state is not None:
                    _give_up(state, f"{type(error).__name__}: {error}")
            return logits


def _shaped(logits: torch.Tensor, states: Sequence[RowState]) -> torch.Tensor:
    if len(states) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(states)} requests")
    rows = logits.clone()
    _penalise(rows, states)
    whys: dict[int, str] = {}
    for i, state in enumerate(states):
        rules, n = state.rules, state.n_generated
        if n == WITHIN:
            continue
        if n < rules.min_new_tokens and rules.end_ids:
            rows[i, list(rules.end_ids)] = -torch.inf
        if rules.processors:
            done = apply(state.processors(logits.shape[-1]), rows[i], state.so_far())
            if isinstance(done, str):
                whys[i] = done
            else:
                rows[i] = done
    # Nothing can be drawn from a row without a finite maximum: SGLang would end with it.
    had = logits.amax(-1).abs() <= MAX_LOGIT
    gone = had & ~(rows.amax(-1).abs() <= MAX_LOGIT)
    lost: list[int] = gone.nonzero()[:, 0].cpu().numpy().tolist()
    for i in {*lost, *whys}:
        _give_up(states[i], whys.get(i, NOTHING_LEFT))
        rows[i] = logits[i]
    return rows


def _penalise(rows: torch.Tensor, states: Sequence[RowState]) -> None:
    found = [i for i, state in enumerate(states) if state.rules.penalties != NO_PENALTIES]
    found = [i for i in found if states[i].n_generated != WITHIN]
    if not found:
        return
    histories = [states[i].history(rows) for i in found]
    counts = torch.stack([counts for counts, _ in histories])
    seen = torch.stack([seen for _, seen in histories])
    penalties = [states[i].rules.penalties for i in found]
    columns = torch.tensor([[p.repetition, p.frequency, p.presence] for p in penalties])
    index = torch.tensor(found, device=rows.device)
    rows[index] = penalised(rows[index], counts, seen, columns.to(rows.device))


def _give_up(state: RowState, why: str) -> None:
    state.give_up(upstream.abort_reason(why[:400], HTTPStatus.UNPROCESSABLE_ENTITY))
