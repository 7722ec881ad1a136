"""The running state of one request: what it was asked, what it has so far, when it ends."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rolloutbus.bus.wire.codec import AnyArray, array_of
from rolloutbus.bus.wire.entry import AttemptKey
from rolloutbus.bus.wire.limits import MAX_PIECE_BYTES
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import (
    NOTHING_MORE,
    Array,
    FinishReason,
    SamplingParams,
    Want,
)
from rolloutbus.engine_worker.engine import EngineFacts, Float32s, Int32s, Step, Work

if TYPE_CHECKING:
    from rolloutbus.engine_worker.engines.shared.processors import LogitProcessor
    from rolloutbus.engine_worker.engines.transformers.grammars import GrammarMatch
    from rolloutbus.engine_worker.engines.transformers.lora_layers import LoadedAdapter

NO_FLOATS: Float32s = np.zeros(0, np.float32)
NO_IDS: Int32s = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """Details of one token."""

    top_logprobs: Float32s
    """float32 [k], likeliest first."""
    top_token_ids: Int32s
    """int32 [k]."""
    logprobs_of: Float32s
    """float32 [c]."""
    support: Int32s
    """int32 [s]: ids that it was sampled from."""


@dataclass(slots=True)
class WantedTokens:
    """Details of all tokens that one execution samples."""

    want: Want
    rows: list[TokenDetails] = field(default_factory=list[TokenDetails])
    n_cached: int | None = None
    """Tokens found in the prefix cache when it began; None: it has not."""

    def arrays(self) -> Mapping[str, Array]:
        """As the result carries them; see docs/protocol.md, "Arrays"."""
        rows, want = self.rows, self.want
        found: dict[str, AnyArray] = {}
        if k := want.top_logprobs:
            found["top_logprobs"] = stacked([row.top_logprobs for row in rows], k, "float32")
            found["top_token_ids"] = stacked([row.top_token_ids for row in rows], k, "int32")
        if c := len(want.logprobs_of):
            found["logprobs_of"] = stacked([row.logprobs_of for row in rows], c, "float32")
        if want.sampling_mask:
            found["sampling_mask"] = np.concatenate([NO_IDS, *(row.support for row in rows)])
            counts = [len(row.support) for row in rows]
            found["sampling_mask_counts"] = np.array(counts, np.int32)
        if want.cached_tokens:
            found["cached_tokens"] = np.array([self.n_cached or 0], np.int32)
        return {name: array_to_send(values) for name, values in found.items()}


def array_to_send(values: AnyArray) -> Array:
    """An array for the wire; one that is too large stays too large for a result, and is empty."""
    if values.nbytes > MAX_PIECE_BYTES:
        return Array("uint8", (MAX_PIECE_BYTES + 1,), bytes(MAX_PIECE_BYTES + 1))
    return array_of(values)


def stacked(rows: "list[Float32s] | list[Int32s]", width: int, dtype: str) -> AnyArray:
    """One row per token, [n, width]; also of none."""
    return np.array(rows, dtype).reshape(len(rows), width)


EndsText = Callable[[Sequence[int]], "bool | Problem"]
"""Whether the last of these generated tokens completes a stop text or pattern; or why that cannot
be told."""


@dataclass(slots=True, eq=False)
class EngineRequest:
    """One request inside an engine; lives until the step that carries its finish."""

    key: AttemptKey
    prompt: Int32s
    """int32 [n_prompt_tokens]."""
    sampling: SamplingParams
    tokens: list[int]
    """Generated so far, the resumed prefix first."""
    seed: int
    """uint64; token i is drawn from (seed, i)."""
    end_ids: frozenset[int]
    """Tokens that end it: its stop ids, and the model's unless they are ignored."""
    processors: "Sequence[LogitProcessor]" = ()
    wanted: WantedTokens | None = None
    """What to tell of each token; None: nothing more."""
    ends_text: EndsText | None = None
    adapter: "LoadedAdapter | None" = None
    grammar: "GrammarMatch | None" = None
    """Has accepted `tokens`."""

    @property
    def kv_root(self) -> bytes:
        """Where the chain of its KV blocks begins."""
        return b"" if self.adapter is None else self.adapter.kv_root

    @property
    def n_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt) + len(self.tokens)

    @property
    def n_tokens_at_most(self) -> int:
        """Prompt and generated tokens when it runs to its limit."""
        return len(self.prompt) + max(len(self.tokens), self.sampling.max_new_tokens)

    def all_tokens(self) -> Int32s:
        """Prompt and generated tokens, int32 [n_tokens]."""
        return np.concatenate([self.prompt, np.asarray(self.tokens, dtype=np.int32)])

    def ending(self) -> FinishReason | Problem | None:
        """Why it is complete, or has failed; None while it goes on."""
        n = len(self.tokens)
        if self.grammar is not None and self.grammar.is_over:
            return "stop"
        # Up to min_new_tokens the ending ids are banned, so one found there is a leftover of a
        # prefix sampled under other rules and ends nothing.
        if n > self.sampling.min_new_tokens and (stopped := self._is_stopped()):
            return stopped if isinstance(stopped, Problem) else "stop"
        return "length" if n >= self.sampling.max_new_tokens else None

    def _is_stopped(self) -> bool | Problem:
        if self.tokens[-1] in self.end_ids:
            return True
        return self.ends_text is not None and self.ends_text(self.tokens)


def open_request(work: Work, facts: EngineFacts, seed: int) -> EngineRequest:
    """The state of `work` before its first step; `seed`, uint64, is used when it names none.

    Raises:
        ValueError: the request does not fit the engine; nothing was queued.
    """
    sampling = work.sampling
    eos = () if sampling.ignore_eos else facts.eos_token_ids
    prefix = b"" if work.prefix is None else work.prefix.tokens
    request = EngineRequest(
        key=work.key,
        prompt=np.ascontiguousarray(work.prompt, dtype=np.int32),
        sampling=sampling,
        tokens=list(struct.unpack(f"<{len(prefix) // 4}i", prefix)),
        seed=(seed if sampling.sampling_seed is None else sampling.sampling_seed)
        & 0xFFFF_FFFF_FFFF_FFFF,
        end_ids=frozenset({*eos, *sampling.stop_token_ids}),
        wanted=None if work.want == NOTHING_MORE else WantedTokens(work.want),
    )
    if len(request.prompt) == 0:
        raise ValueError(f"{work.key}: the prompt is empty")
    if request.n_tokens_at_most > facts.max_context:
        raise ValueError(
            f"{work.key}: prompt and max_new_tokens need {request.n_tokens_at_most} tokens, "
            f"max_context is {facts.max_context}"
        )
    known = request.all_tokens()
    if known.min() < 0 or known.max() >= facts.vocab_size:
        raise ValueError(f"{work.key}: a token id is outside of [0, {facts.vocab_size})")
    return request


def refusal(key: AttemptKey, problem: Problem) -> Step:
    """The only step of a request that is not run."""
    nothing, no_logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Step([key], [0], nothing, no_logprobs, version=0, problems=((0, problem),))
