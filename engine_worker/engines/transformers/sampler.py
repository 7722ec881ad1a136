"""How logits become tokens: one vectorised draw for a batch, every parameter per row.

Order: grammar, bias, penalties, ban of ending ids before min_new_tokens, processors, temperature;
`logprobs` is the log-softmax at this point. Then top-k, top-p and min-p, all three judged on this
distribution; `behaviour_logprobs` is renormalised over what they leave. A row at temperature 0
takes the likeliest token, and its logprobs are those of temperature 1.

A token is drawn by inverting the cumulative distribution at one uniform number that depends on
the request's seed and the token's index only, so it depends neither on the batch nor on whether
the request was resumed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.validation import truncates
from rolloutbus.engine_worker.engine import Float32s, Int32s
from rolloutbus.engine_worker.engines.shared.request import EngineRequest, TokenDetails
from rolloutbus.engine_worker.engines.shared.row_rules import BROKEN_WEIGHTS, RowRules, penalised
from rolloutbus.engine_worker.engines.transformers.grammars import GrammarMasks

Slots = np.ndarray[tuple[int], np.dtype[np.int64]]
Float64s = np.ndarray[tuple[int], np.dtype[np.float64]]
UInt64s = np.ndarray[tuple[int], np.dtype[np.uint64]]


@dataclass(frozen=True, slots=True)
class Draw:
    """One token per row."""

    tokens: Int32s
    """int32 [n]."""
    logprobs: Float32s
    """float32 [n]."""
    behaviour_logprobs: Float32s | None
    """float32 [n]; None: no row truncates."""
    wanted: Mapping[int, TokenDetails] = field(default_factory=dict[int, TokenDetails])
    """Row -> details of its token that its request asked for."""
    failed: Mapping[int, Problem] = field(default_factory=dict[int, Problem])
    """Row -> why nothing could be drawn for it; its token means nothing."""

    def take(self, rows: Sequence[int]) -> "Draw":
        """Only these rows, in this order; none that failed."""
        behaviour = self.behaviour_logprobs
        return Draw(
            self.tokens[rows],
            self.logprobs[rows],
            None if behaviour is None else behaviour[rows],
            {i: self.wanted[row] for i, row in enumerate(rows) if row in self.wanted},
        )


def uniforms(seeds: UInt64s, indices: Slots) -> Float64s:
    """Numbers in [0, 1), float64 [n], each a pure function of its (seed, index).

    Source: the splitmix64 finaliser, Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, 2014.
    """
    return _uniforms_of(_mixed_seeds(seeds), indices)


def _mixed_seeds(seeds: UInt64s) -> UInt64s:
    """The part of `uniforms` that depends on the seeds only."""
    return _mix(seeds + np.uint64(0x9E3779B97F4A7C15))


def _uniforms_of(mixed_seeds: UInt64s, indices: Slots) -> Float64s:
    mixed = _mix(mixed_seeds ^ indices.view(np.uint64))
    # 52 bits and not 53: u * total then stays below total after rounding.
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: UInt64s) -> UInt64s:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True, eq=False)
class _Parameters:
    """Of the rows of a batch; they stay the same from step to step while the rows do."""

    slots: Slots
    mixed_seeds: UInt64s
    greedy: torch.Tensor | None
    """bool [n]: which rows take the likeliest; None: no row does."""
    is_all_greedy: bool
    divisor: torch.Tensor | None
    """float32 [n, 1]; None: 1 for all."""
    truncates: np.ndarray[tuple[int], np.dtype[np.bool_]]
    truncated: Slots
    """Rows of which that is true."""
    penalised: Slots
    """Rows with penalties."""


class Sampler:
    """Sampling parameters and penalty counts of the requests in their slots."""

    def __init__(self, n_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._temperature = np.ones(n_slots, np.float64)
        self._seed = np.zeros(n_slots, np.uint64)
        self._n_generated = np.zeros(n_slots, np.int64)
        self._min_new = np.zeros(n_slots, np.int64)
        self._truncation = np.zeros((n_slots, 3), np.float64)
        """top_k (as the vocabulary's size when off), top_p, min_p."""
        self._penalties = np.zeros((n_slots, 3), np.float64)
        """repetition, frequency, presence."""
        self._truncates = np.zeros(n_slots, np.bool_)
        self._penalises = np.zeros(n_slots, np.bool_)
        self._end_ids: dict[int, torch.Tensor] = {}
        self._parameters: _Parameters | None = None
        """Of the last step."""
        self._grammars = GrammarMasks(n_slots)
        self._rules = RowRules(device)
        self._counts: torch.Tensor | None = None
        """int32 [n_slots, vocab]: how often generated. Only exists once a request penalises."""
        self._seen: torch.Tensor | None = None
        """bool [n_slots, vocab]: in the prompt or generated."""

    def enter(self, slot: int, request: EngineRequest) -> None:
        """Set `slot` up for `request`, its tokens so far included."""
        s = request.sampling
        self._parameters = None
        self._temperature[slot] = s.temperature
        self._seed[slot] = request.seed
        self._n_generated[slot] = len(request.tokens)
        self._min_new[slot] = s.min_new_tokens
        top_k = s.top_k if 0 < s.top_k < self._vocab_size else self._vocab_size
        self._truncation[slot] = (top_k, s.top_p, s.min_p)
        self._truncates[slot] = truncates(s, self._vocab_size)
        self._penalties[slot] = (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
        self._penalises[slot] = tuple(self._penalties[slot]) != (1.0, 0.0, 0.0)
        self._end_ids.pop(slot, None)
        if s.min_new_tokens > len(request.tokens):
            ids = sorted(i for i in request.end_ids if 0 <= i < self._vocab_size)
            self._end_ids[slot] = torch.tensor(ids, dtype=torch.int64, device=self._device)
        self._grammars.enter(slot, request.grammar)
        self._rules.enter(slot, request)
        if self._penalises[slot]:
            self._count_all(slot, request)

    def sample(self, logits: torch.Tensor, slots: Slots) -> Draw:
        """Draw the next token of each row; overwrites `logits`.

        Args:
            logits: any float dtype [n, vocab].
            slots: int64 [n], the slot of each row, each at most once.
        """
        rows = self._parameters_of(slots)
        scores = logits.float()
        dead_ends = self._grammars.apply(scores, slots)
        self._rules.bias(scores, slots)
        self._penalise(scores, rows)
        self._ban_endings(scores, slots)
        ruled_out = {**self._rules.process(scores, slots), **dead_ends}
        if rows.divisor is not None:
            scores = scores / rows.divisor
        logprobs = torch.log_softmax(scores, dim=-1)
        tokens, probs, mass = self._draw(logprobs, rows)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        # One copy to the host for everything: float64 holds int32 and float32 exactly.
        told = [tokens.double(), chosen.double()]
        if len(rows.truncated):
            told.append(mass.log())
        columns = torch.stack(told).cpu().numpy()
        broken = np.flatnonzero(~np.isfinite(columns[1]))
        failed = {**ruled_out, **dict.fromkeys(broken.tolist(), BROKEN_WEIGHTS)}
        drawn = self._finish(columns, rows)
        wanted = self._rules.wanted(logprobs, probs, drawn.tokens, slots)
        return replace(drawn, wanted=wanted, failed=failed) if wanted or failed else drawn

    def _parameters_of(self, slots: Slots) -> _Parameters:
        last = self._parameters
        if last is not None and np.array_equal(last.slots, slots):
            return last
        temperature = self._temperature[slots]
        greedy = temperature == 0.0
        divisor = np.where(greedy, 1.0, temperature)
        truncates = self._truncates[slots]
        self._parameters = found = _Parameters(
            slots=slots.copy(),
            mixed_seeds=_mixed_seeds(self._seed[slots]),
            greedy=torch.as_tensor(greedy, device=self._device) if greedy.any() else None,
            is_all_greedy=bool(greedy.all()),
            divisor=self._column(divisor) if (divisor != 1.0).any() else None,
            truncates=truncates,
            truncated=np.flatnonzero(truncates),
            penalised=np.flatnonzero(self._penalises[slots]),
        )
        return found

    def _finish(self, columns: np.ndarray, rows: _Parameters) -> Draw:
        tokens = columns[0].astype(np.int32)
        self._n_generated[rows.slots] += 1
        self._count_new(tokens, rows)
        behaviour = None
        if len(rows.truncated):
            cut = np.where(rows.truncates, columns[2], 0.0)
            behaviour = (columns[1] - cut).astype(np.float32)
        return Draw(tokens, columns[1].astype(np.float32), behaviour)

    def _draw(
        self, logprobs: torch.Tensor, rows: _Parameters
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Tokens int64 [n], what truncation left float64 [n, vocab], and its sums float64 [n].

        None in the middle: every row takes the likeliest.
        """
        if rows.is_all_greedy:
            tokens = logprobs.argmax(dim=-1)
            return tokens, None, torch.ones_like(tokens, dtype=torch.float64)
        # In float32 the cumulative sum of a large vocabulary would lose its tail.
        probs = logprobs.double().exp_()
        if len(rows.truncated):
            self._truncate(probs, rows.truncated, rows.slots[rows.truncated])
        cumulative = probs.cumsum(dim=-1)
        mass = cumulative[:, -1]
        drawn = _uniforms_of(rows.mixed_seeds, self._n_generated[rows.slots])
        at = self._column(drawn, torch.float64)
        # The first index whose sum exceeds u: never one of probability 0.
        tokens = torch.searchsorted(cumulative, at * mass[:, None], right=True)[:, 0]
        # Of NaN every index is past the end; such a row is known by its logprob.
        tokens.clamp_(max=self._vocab_size - 1)
        if rows.greedy is not None:
            tokens = torch.where(rows.greedy, logprobs.argmax(dim=-1), tokens)
        return tokens, probs, mass

    def _truncate(self, probs: torch.Tensor, rows: Slots, slots: Slots) -> None:
        """Zero what top-k, top-p and min-p cut off, in these rows of `probs`."""
        top_k, top_p, min_p = (
            self._column(self._truncation[slots, i], torch.float64) for i in range(3)
        )
        index = torch.as_tensor(rows, device=self._device)
        ordered, order = probs[index].sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        rank = torch.arange(ordered.shape[-1], device=self._device)
        keep = (rank < top_k) & (before < top_p) & (ordered >= ordered[:, :1] * min_p)
        keep[:, 0] = True
        probs[index] = torch.zeros_like(ordered).scatter_(1, order, ordered * keep)

    def _penalise(self, scores: torch.Tensor, parameters: _Parameters) -> None:
        rows, slots = parameters.penalised, parameters.slots
        if not len(rows):
            return
        assert self._counts is not None
        assert self._seen is not None
        index = torch.as_tensor(rows, device=self._device)
        held = torch.as_tensor(slots[rows], device=self._device)
        penalties = torch.as_tensor(self._penalties[slots[rows]], dtype=torch.float32)
        counts, seen = self._counts[held], self._seen[held]
        scores[index] = penalised(scores[index], counts, seen, penalties.to(self._device))

    def _ban_endings(self, scores: torch.Tensor, slots: Slots) -> None:
        if not self._end_ids:
            return
        for row in np.flatnonzero(self._n_generated[slots] < self._min_new[slots]):
            scores[int(row), self._end_ids[int(slots[row])]] = -torch.inf

    def _count_all(self, slot: int, request: EngineRequest) -> None:
        if self._counts is None or self._seen is None:
            shape = (len(self._seed), self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
        counts = np.bincount(request.tokens, minlength=self._vocab_size)
        seen = counts > 0
        seen[request.prompt] = True
        self._counts[slot] = torch.as_tensor(counts, device=self._device)
        self._seen[slot] = torch.as_tensor(seen, device=self._device)

    def _count_new(self, tokens: Int32s, parameters: _Parameters) -> None:
        rows, slots = parameters.penalised, parameters.slots
        if not len(rows):
            return
        assert self._counts is not None
        assert self._seen is not None
        held = torch.as_tensor(slots[rows], device=self._device)
        ids = torch.as_tensor(tokens[rows].astype(np.int64), device=self._device)
        self._counts[held, ids] += 1
        self._seen[held, ids] = True

    def _column(
        self, values: Sequence[float] | Float64s, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype, device=self._device)[:, None]
