"""One running request: everything it has sampled, which is also its replay window."""

import numpy as np
import xxhash

from rolloutbus.bus.wire.entry import AttemptKey, Entry, RequestId
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import (
    Array,
    FinishReason,
    Generate,
    Generated,
    Repair,
    Repaired,
    VersionRuns,
)
from rolloutbus.bus.wire.validation import truncates

ITEM_BYTES = 4
"""Of a token (int32) and of a logprob (float32)."""
NEVER = float("inf")


def is_pinned(entry: Entry) -> bool:
    """Whether a `generate` must end on the weights it begins with."""
    return entry.place is not None and entry.place.versions.startswith("exact:")


class RunningRequest:
    """Columns of all tokens so far, with the tokens of earlier attempts (the prefix)."""

    __slots__ = (
        "_behaviour",
        "_logprobs",
        "_n_prompt",
        "_started_at",
        "_tokens",
        "_wanted_lora",
        "arrays",
        "arrived_at",
        "client",
        "deadline_at",
        "is_pinned",
        "is_streamed",
        "key",
        "lora",
        "n_prefix",
        "n_published",
        "n_tokens",
        "published_at",
        "runs",
        "sampled_at",
    )

    def __init__(self, entry: Entry, body: Generate, now: float, vocab_size: int) -> None:
        self.key: AttemptKey = (RequestId(entry.rid), entry.attempt)
        self.client = entry.route
        self.is_streamed = body.stream
        self.is_pinned = is_pinned(entry)
        """Must end on the weights it began with."""
        self.arrived_at = now
        self.deadline_at = now + entry.deadline_ms / 1000 if entry.deadline_ms > 0 else NEVER
        self.published_at = now
        self.sampled_at: float | None = None
        """When the last token came here; None before the first."""
        self._started_at = 0.0
        self._n_prompt = len(body.prompt) // ITEM_BYTES
        prefix = body.prefix
        self._tokens = bytearray(prefix.tokens if prefix else b"")
        self._logprobs = bytearray(prefix.logprobs if prefix else b"")
        self._behaviour: bytearray | None = None
        if truncates(body.sampling, vocab_size):
            self._behaviour = bytearray(prefix.behaviour_logprobs if prefix else b"")
        self.runs: list[list[int]] = [list(run) for run in prefix.versions] if prefix else []
        """[[version, n_tokens]]."""
        self.n_tokens = len(self._tokens) // ITEM_BYTES
        self.n_prefix = self.n_published = self.n_tokens
        self.arrays: dict[str, Array] = {}
        """What was wanted besides; they come just before the end."""
        self._wanted_lora = body.lora
        self.lora = ""
        """The adapter that the engine has given it, `NAME@VERSION`."""

    @property
    def has_behaviour(self) -> bool:
        """Whether its tokens carry logprobs of the truncated support."""
        return self._behaviour is not None

    @property
    def lacks_adapter(self) -> bool:
        """Whether it asked for an adapter and the engine has not reported which one it got."""
        return bool(self._wanted_lora) and not self.lora

    def began_with(self, lora: str) -> None:
        """The engine has given it this adapter; one that it did not ask for does not count."""
        if lora == self._wanted_lora or lora.rpartition("@")[0] == self._wanted_lora:
            self.lora = lora

    def add(
        self,
        version: int,
        tokens: memoryview,
        logprobs: memoryview,
        behaviour: memoryview,
        now: float,
    ) -> None:
        """Append one step's row; raw int32 and float32 columns of equal length.

        `behaviour` is of no use for requests that do not truncate.
        """
        n_new = len(tokens) // ITEM_BYTES
        if not n_new:
            return
        if not self._started_at:
            self._started_at = now
        self._tokens += tokens
        self._logprobs += logprobs
        if self._behaviour is not None:
            self._behaviour += behaviour
        self.n_tokens += n_new
        runs = self.runs
        if runs and runs[-1][0] == version:
            runs[-1][1] += n_new
        else:
            runs.append([version, n_new])

    def columns(self, start: int, stop: int) -> tuple[bytes, bytes, bytes]:
        """Raw tokens, logprobs and behaviour logprobs (logprobs if none) of [start, stop)."""
        part = slice(start * ITEM_BYTES, stop * ITEM_BYTES)
        logprobs = bytes(self._logprobs[part])
        behaviour = logprobs if self._behaviour is None else bytes(self._behaviour[part])
        return bytes(self._tokens[part]), logprobs, behaviour

    def runs_from(self, start: int) -> VersionRuns:
        """Version runs of the tokens from `start` on."""
        found: VersionRuns = []
        end = 0
        for version, count in self.runs:
            end += count
            if end > start:
                found.append((version, min(count, end - start)))
        return found

    def generated(self, reason: FinishReason, now: float) -> Generated:
        """Its result."""
        tokens = bytes(self._tokens)
        started_at = self._started_at or now
        return Generated(
            tokens=tokens,
            logprobs=bytes(self._logprobs),
            versions=[(version, count) for version, count in self.runs],
            finish_reason=reason,
            digest=xxhash.xxh3_64_intdigest(tokens),
            n_prompt_tokens=self._n_prompt,
            behaviour_logprobs=bytes(self._behaviour or b""),
            n_resumed=self.n_prefix,
            queue_ms=(started_at - self.arrived_at) * 1000,
            run_ms=(now - started_at) * 1000,
            arrays=self.arrays,
            lora=self.lora,
        )


def repaired(request: RunningRequest, repair: Repair) -> Repaired | Problem:
    """The part of a running request that a subscriber missed."""
    if not 0 <= repair.start <= request.n_tokens:
        message = f"start is {repair.start}; the request has {request.n_tokens} tokens"
        return Problem("bad_request", message, "not_started", field="start")
    tokens, logprobs, behaviour = request.columns(repair.start, request.n_tokens)
    runs = request.runs_from(repair.start)
    known = behaviour if request.has_behaviour else b""
    return Repaired(repair.start, tokens, logprobs, runs, known)


def repaired_from_result(result: Generated, repair: Repair) -> Repaired:
    """Like the other, for an ended request whose client has not fetched the result yet."""
    n_tokens = len(result.tokens) // ITEM_BYTES
    start = min(max(repair.start, 0), n_tokens)
    token_versions = np.repeat(
        np.array([version for version, _ in result.versions], np.uint64),
        [count for _, count in result.versions],
    )[start:]
    edges = np.flatnonzero(np.diff(token_versions, prepend=token_versions[:1] + 1))
    counts = np.diff(edges, append=len(token_versions))
    runs = [(int(token_versions[at]), int(n)) for at, n in zip(edges, counts, strict=True)]
    part = slice(start * ITEM_BYTES, None)
    behaviour = result.behaviour_logprobs[part]
    return Repaired(start, result.tokens[part], result.logprobs[part], runs, behaviour)
