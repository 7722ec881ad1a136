"""Grammars that outputs must match: compiled by xgrammar, one match for each request.

SGLang uses xgrammar, too, and each kind of grammar is read as it has it read there: a text means
the same on both engines. Grammars are compiled on threads of their own, while the engine makes its
steps, and kept. xgrammar is an optional dependency, imported when an engine is built that has it.
"""

import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from time import thread_time
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.generation import Grammar

PACKAGE = "xgrammar"
INSTALL = "install xgrammar where this worker runs: pip install 'rolloutbus[grammar]'"
MAX_DEPTH = 128
"""Of a schema's nesting. The time to compile one grows with the third power of it: 0.3 s here, 15 s
at 512."""
CACHE_BYTES = 256 * 1024 * 1024
"""Of compiled grammars; the least recently used are forgotten."""
GRACE_S = 0.5
TOKEN_S = 0.005
"""CPU time that one request's grammar may take, and more for each of its tokens. All requests wait
for it, so an ambiguous grammar that takes more is given up; usual ones take 0.2 ms a token."""
THREADS = 2
"""Grammars that are compiled side by side, so that a slow one does not delay all others."""

Slots = np.ndarray[tuple[int], np.dtype[np.int64]]
DEAD_END = Problem(
    "bad_request",
    "Nothing can be sampled: no token of the model's vocabulary goes on in the grammar.",
    "failed",
    field="grammar.text",
)
"""The end of a request whose grammar asks for what no token spells."""
TOO_SLOW = Problem(
    "bad_request",
    "The grammar is too ambiguous: its tokens take too long to be checked, and others wait for "
    "them; have fewer repetitions inside of repetitions.",
    "failed",
    field="grammar.text",
)
"""The end of a request whose grammar would hold up all others."""
OUT_OF_STEP = Problem(
    "engine_failed", "xgrammar refuses a token that it allowed.", "failed", field="grammar"
)
"""The end of a request whose grammar and tokens no longer fit; never seen."""


def installed_version() -> str:
    """Of xgrammar; empty: it is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        return ""
    return importlib.metadata.version(PACKAGE)


class GrammarMatch:
    """How far one request's output has come in its grammar.

    A grammar ends with one of the model's end-of-sequence tokens, which is allowed where the
    grammar may end; `ignore_eos` changes nothing about that. Without such tokens it ends where
    nothing can follow.
    """

    def __init__(self, matcher: Any, n_words: int, end: int | None) -> None:  # noqa: ANN401
        """Nothing is matched yet.

        Args:
            matcher: xgrammar's, untyped.
            n_words: 32-bit words of a mask of the vocabulary.
            end: id beyond the vocabulary that ends the grammar; None: the model has tokens for it.
        """
        self.n_words = n_words
        self._matcher = matcher
        self._end = end
        self._mask = torch.empty((1, n_words), dtype=torch.int32)
        self._spent_s = 0.0
        """CPU time so far."""
        self._n_tokens = 0
        self.is_over = self._is_over()
        """Nothing can follow."""

    def accept(self, token: int) -> bool:
        """Go on by one token; False: the grammar does not allow it, and nothing has changed."""
        began = thread_time()
        is_allowed: bool = self._matcher.accept_token(token)
        self._spent_s += thread_time() - began
        self._n_tokens += 1
        self.is_over = self._is_over()
        return is_allowed

    @property
    def is_slow(self) -> bool:
        """Whether it has taken longer than it may."""
        return self._spent_s > GRACE_S + TOKEN_S * self._n_tokens

    def fill(self, masks: torch.Tensor, row: int) -> bool:
        """Write which tokens may follow; returns whether any may.

        Args:
            masks: int32 [rows, n_words], on the CPU, a bit for each token.
            row: that is written.
        """
        began = thread_time()
        self._matcher.fill_next_token_bitmask(masks, row)
        self._spent_s += thread_time() - began
        return bool(masks[row].any())

    def _is_over(self) -> bool:
        if self._end is None:
            return bool(self._matcher.is_terminated())
        if not self._matcher.is_completed():
            return False
        self.fill(self._mask, 0)
        words = self._mask[0].numpy().view(np.uint32)
        word, bit = divmod(self._end, 32)
        words[word] &= ~np.uint32(1 << bit)
        return not words.any()


class Grammars:
    """Compiles grammars for one model's vocabulary, and keeps what was compiled."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        # A grammar always has an end, which a model without one never samples.
        self._end = None if eos_token_ids else vocab_size
        self._eos = [*eos_token_ids] or [vocab_size]
        self._size = vocab_size if self._end is None else vocab_size + 1
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammars")
        self._lock = Lock()
        self._made: Any = None
        """xgrammar's compiler. Not there before the first grammar: it takes a second."""

    def begin(
        self,
        grammar: Grammar,
        tokens: Sequence[int],
        done: Callable[[GrammarMatch | Problem], None],
    ) -> None:
        """Have a match of these tokens made; `done` gets it, or why there is none, on a thread."""
        self._threads.submit(lambda: done(self._match_of(grammar, tokens)))

    def match(self, grammar: Grammar) -> GrammarMatch:
        """A match that has just begun; may take seconds when the grammar is new.

        Raises:
            ValueError: the grammar is wrong, with a sentence that says where.
        """
        try:
            compiled = self._compiled(grammar)
            matcher = _xgrammar().GrammarMatcher(compiled)
        # What is wrong with a grammar is a bare RuntimeError; so is a text that is too deep.
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            raise ValueError(_told(error)) from error
        return GrammarMatch(matcher, -(-self._size // 32), self._end)

    def close(self) -> None:
        """Forget what waits; a grammar that is being compiled is left to its thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _match_of(self, grammar: Grammar, tokens: Sequence[int]) -> GrammarMatch | Problem:
        try:
            match = self.match(grammar)
        except ValueError as error:
            return bad_request("grammar.text", f"it is no {grammar.kind}: {error}")
        # A fault here must end the request, which nobody else would.
        except Exception as error:  # noqa: BLE001
            message = f"The grammar could not be made: {type(error).__name__}: {error}"[:500]
            return Problem("engine_failed", message, "failed", field="grammar")
        for i, token in enumerate(tokens):
            if not match.accept(token):
                why = f"token {token} at index {i} does not match the grammar"
                return bad_request("prefix.tokens", why)
        return match

    def _compiled(self, grammar: Grammar) -> object:
        compiler = self._compiler()
        match grammar.kind:
            case "json_schema":
                _check_depth(json.loads(grammar.text))
                return compiler.compile_json_schema(grammar.text)
            case "regex":
                return compiler.compile_regex(grammar.text)
            case "ebnf":
                return compiler.compile_grammar(grammar.text)
            case "structural_tag":
                tag = json.loads(grammar.text)
                _check_depth(tag)
                return compiler.compile_structural_tag(*_structural_tag(grammar.text, tag))

    def _compiler(self) -> Any:  # noqa: ANN401 - untyped
        with self._lock:
            if self._made is None:
                info = _xgrammar().TokenizerInfo.from_huggingface(
                    self._tokenizer, vocab_size=self._size, stop_token_ids=self._eos
                )
                self._made = _xgrammar().GrammarCompiler(
                    info, max_threads=1, cache_limit_bytes=CACHE_BYTES
                )
            return self._made


class GrammarMasks:
    """Rules out, in the rows of a batch, tokens that their requests' grammars do not allow."""

    def __init__(self, n_slots: int) -> None:
        self._n_slots = n_slots
        self._matches: dict[int, GrammarMatch] = {}
        self._masks: torch.Tensor | None = None
        """int32 [n_slots, n_words], on the CPU. Only exists once a request has a grammar."""

    def enter(self, slot: int, match: GrammarMatch | None) -> None:
        """Set `slot` up for a request with this match; None: it has no grammar."""
        self._matches.pop(slot, None)
        if match is not None:
            self._matches[slot] = match

    def apply(self, scores: torch.Tensor, slots: Slots) -> Mapping[int, Problem]:
        """Set scores of what is not allowed to -inf; row -> why it failed.

        A failed row is left as it is, such that a draw from it does no harm.

        Args:
            scores: float32 [n, vocab], overwritten.
            slots: int64 [n].
        """
        if not self._matches:
            return {}
        found = {i: self._matches.get(slot) for i, slot in enumerate(slots.tolist())}
        rows = {i: match for i, match in found.items() if match is not None}
        if not rows:
            return {}
        if self._masks is None:
            n_words = next(iter(rows.values())).n_words
            self._masks = torch.empty((self._n_slots, n_words), dtype=torch.int32)
        failed: dict[int, Problem] = {}
        for i, match in rows.items():
            if not match.fill(self._masks, i):
                failed[i] = DEAD_END
            elif match.is_slow:
                failed[i] = TOO_SLOW
        _apply(scores, self._masks, [i for i in rows if i not in failed])
        return failed


def _xgrammar() -> Any:  # noqa: ANN401 - untyped
    import xgrammar  # noqa: PLC0415 - optional

    return xgrammar


def _structural_tag(text: str, tag: object) -> Sequence[object]:
    """What xgrammar is to compile: the text, or items and triggers of the older form.

    That one, schemas between texts that begin with triggers, is what SGLang takes as well.
    """
    if not isinstance(tag, dict) or "structures" not in tag:
        return [text]
    older = cast("dict[str, Any]", tag)
    items = [
        _xgrammar().StructuralTagItem(
            begin=each["begin"], schema=json.dumps(each["schema"]), end=each["end"]
        )
        for each in older["structures"]
    ]
    return items, older["triggers"]


def _apply(scores: torch.Tensor, masks: torch.Tensor, rows: list[int]) -> None:
    if not rows:
        return
    on_cpu = scores.device.type == "cpu"
    # On a GPU its default is a kernel that wants a C compiler at the first request.
    _xgrammar().apply_token_bitmask_inplace(
        scores,
        masks[: len(scores)].to(scores.device),
        vocab_size=scores.shape[-1],
        indices=rows,
        backend="cpu" if on_cpu else "torch_native",
    )


def _check_depth(value: object) -> None:
    """Refuse what is nested too deep; RecursionError, a RuntimeError, if it is far too deep."""
    waiting = [(value, 1)]
    while waiting:
        each, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        if isinstance(each, dict):
            waiting += [(v, depth + 1) for v in cast("dict[str, object]", each).values()]
        elif isinstance(each, list):
            waiting += [(v, depth + 1) for v in cast("list[object]", each)]


_PLACE_IN_SOURCE = re.compile(r"^\[[\d:]+\] \S+\.cc:\d+: (Check failed: \(.*?\) is false: )?")


def _told(error: Exception) -> str:
    """What is wrong with a grammar, without the place in xgrammar's source that found it."""
    if isinstance(error, RecursionError):
        return f"it is nested more than {MAX_DEPTH} levels deep"
    if isinstance(error, KeyError):
        return f"the field {error} is missing"
    return _PLACE_IN_SOURCE.sub("", str(error)).strip()[:400]
