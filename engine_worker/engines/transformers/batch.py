"""The requests that run together on the transformers engine: admission, prefill plan, decode.

A step computes a chunk of the prompts that were admitted and one token of everything that
decodes, then samples once for all rows that reached a next token.
"""

from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
import torch

from rolloutbus.bus.wire.entry import AttemptKey
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.generation import Array, FinishReason
from rolloutbus.engine_worker.engine import Int32s, Step
from rolloutbus.engine_worker.engines.shared.request import EngineRequest, TokenDetails
from rolloutbus.engine_worker.engines.shared.row_rules import BROKEN_ADAPTER, BROKEN_WEIGHTS
from rolloutbus.engine_worker.engines.transformers.forward import PADDING, Forward
from rolloutbus.engine_worker.engines.transformers.grammars import OUT_OF_STEP
from rolloutbus.engine_worker.engines.transformers.kv_blocks import (
    BLANK_BLOCK,
    KvBlocks,
    block_keys,
)
from rolloutbus.engine_worker.engines.transformers.lora_layers import Rows
from rolloutbus.engine_worker.engines.transformers.sampler import Draw, Sampler, Slots


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How much runs at once."""

    slots: int
    block_size: int
    max_blocks_per_request: int
    prefill_tokens: int
    """Prompt tokens per step."""


@dataclass(slots=True, eq=False)
class _Row:
    """A running request and its KV."""

    request: EngineRequest
    slot: int
    blocks: list[int]
    known: Int32s
    """int32 [n]: the tokens to prefill."""
    keys: list[bytes]
    """Content keys of the full blocks of `known`."""
    epoch: int
    """Weight change that its KV began under."""


NO_SLOTS = np.zeros(0, np.int64)


@dataclass(slots=True)
class _Computed:
    """Tokens of a step that the requests do not have yet."""

    rows: list[_Row] = field(default_factory=list[_Row])
    slots: Slots = field(default_factory=lambda: NO_SLOTS)
    """Of the rows."""
    draw: Draw | None = None


class Batch:
    """Implements `Stepper` over a model's forward pass."""

    def __init__(
        self, forward: Forward, sampler: Sampler, blocks: KvBlocks, limits: BatchLimits
    ) -> None:
        self._forward = forward
        self._sampler = sampler
        self._blocks = blocks
        self._limits = limits
        self._rows: dict[AttemptKey, _Row] = {}
        """In order of admission."""
        self._free_slots = list(range(limits.slots - 1, -1, -1))
        n_columns = limits.max_blocks_per_request
        self._tables = np.full((limits.slots, n_columns), BLANK_BLOCK, np.int64)
        self._n_kv = np.zeros(limits.slots, np.int64)
        self._last = np.zeros(limits.slots, np.int64)
        self._prefilling: dict[AttemptKey, _Row] = {}
        self._chunks: dict[AttemptKey, int] = {}
        """Prefill planned for the next step: where each row's chunk ends."""
        self._budget = limits.prefill_tokens
        self._computed = _Computed()
        self._epoch = 0
        self.version = 0
        """See `Stepper`."""

    @property
    def n_running(self) -> int:
        """See `Stepper`."""
        return len(self._rows)

    @property
    def n_kv_tokens(self) -> int:
        """See `Stepper`."""
        return int(self._n_kv.sum())

    def change_weights(self, version: int) -> None:
        """From now on steps are of `version`, and no new request shares KV of older weights."""
        self.version = version
        self._epoch += 1
        self._blocks.forget()

    def admit(self, waiting: deque[EngineRequest]) -> None:
        """See `Stepper`."""
        self._plan_prefill()
        fresh: list[int] = []
        while waiting and self._free_slots and self._budget > 0:
            if (row := self._open(waiting[0])) is None:
                break
            waiting.popleft()
            self._plan_chunk(row)
            fresh += row.blocks[int(self._n_kv[row.slot]) // self._limits.block_size :]
        if fresh:
            self._forward.clear(fresh)

    @torch.inference_mode()
    def compute(self) -> None:
        """See `Stepper`."""
        self._plan_prefill()
        decoding = [row for row in self._rows.values() if row.request.key not in self._prefilling]
        logits: list[torch.Tensor] = []
        ready: list[_Row] = []
        for group in self._groups():
            done = [i for i, row in enumerate(group) if self._is_last_chunk(row)]
            out = self._prefill(group)
            if done:
                logits.append(out if len(done) == len(group) else out[done])
                ready += [group[i] for i in done]
        if decoding:
            logits.append(self._decode(decoding))
            ready += decoding
        for key, end in self._chunks.items():
            if end == len(self._prefilling[key].known):
                del self._prefilling[key]
        self._chunks.clear()
        self._budget = self._limits.prefill_tokens
        self._computed = _Computed(ready, slots := _slots(ready))
        if ready:
            scores = logits[0] if len(logits) == 1 else torch.cat(logits)
            self._computed.draw = self._sampler.sample(scores, slots)

    def accept(self, dropped: AbstractSet[AttemptKey]) -> Step:
        """See `Stepper`."""
        rows, slots, draw = self._computed.rows, self._computed.slots, self._computed.draw
        self._computed = _Computed()
        if draw is None:
            empty = np.empty(0, np.float32)
            return Step((), (), np.empty(0, np.int32), empty, self.version)
        self._last[slots] = draw.tokens
        problems = [
            (rows[i].request.key, _problem_of(problem, rows[i].request))
            for i, problem in draw.failed.items()
            if rows[i].request.key not in dropped
        ]
        if dropped or problems:
            gone = {*dropped, *(key for key, _ in problems)}
            kept = [i for i, row in enumerate(rows) if row.request.key not in gone]
            rows, draw = [rows[i] for i in kept], draw.take(kept)
        self.release([key for key, _ in problems])
        finishes: list[tuple[int, FinishReason]] = []
        arrays: list[tuple[int, Mapping[str, Array]]] = []
        for i, (row, token) in enumerate(zip(rows, draw.tokens.tolist(), strict=True)):
            end = _append(row.request, token, draw.wanted.get(i))
            if end is None:
                continue
            if isinstance(end, Problem):
                problems.append((row.request.key, end))
            else:
                finishes.append((i, end))
                if row.request.wanted is not None:
                    arrays.append((i, row.request.wanted.arrays()))
            self._close(row)
        n = len(rows)
        return Step(
            keys=[*(row.request.key for row in rows), *(key for key, _ in problems)],
            counts=[1] * n + [0] * len(problems),
            tokens=draw.tokens,
            logprobs=draw.logprobs,
            version=self.version,
            finishes=finishes,
            behaviour_logprobs=draw.behaviour_logprobs,
            problems=[(n + i, problem) for i, (_, problem) in enumerate(problems)],
            arrays=arrays,
        )

    def release(self, keys: Collection[AttemptKey]) -> None:
        """See `Stepper`."""
        for key in keys:
            if (row := self._rows.get(key)) is not None:
                self._close(row)

    def retract(self, *, without_tokens_only: bool = False) -> list[EngineRequest]:
        """See `Stepper`."""
        rows = list((self._prefilling if without_tokens_only else self._rows).values())
        for row in rows:
            self._close(row)
        return [row.request for row in rows]

    def _open(self, request: EngineRequest) -> _Row | None:
        """Give `request` a slot and all blocks it may need; None when there are not enough."""
        size = self._limits.block_size
        known = request.all_tokens()
        keys = block_keys(known, size, root=request.kv_root)
        # The last known token is always computed: its logits are wanted.
        n_blocks = -(-request.n_tokens_at_most // size)
        reserved = self._blocks.reserve(n_blocks, keys[: (len(known) - 1) // size])
        if reserved is None:
            return None
        slot = self._free_slots.pop()
        self._tables[slot, : len(reserved.blocks)] = reserved.blocks
        self._tables[slot, len(reserved.blocks) :] = BLANK_BLOCK
        self._n_kv[slot] = n_cached = reserved.n_shared * size
        if request.wanted is not None and request.wanted.n_cached is None:
            request.wanted.n_cached = n_cached
        row = _Row(request, slot, reserved.blocks, known, keys, self._epoch)
        self._rows[request.key] = row
        self._prefilling[request.key] = row
        self._sampler.enter(slot, request)
        return row

    def _close(self, row: _Row) -> None:
        """Free the slot and the blocks of `row`, keeping full blocks findable by content."""
        if row.request.key not in self._prefilling:
            tokens = row.request.all_tokens()[: int(self._n_kv[row.slot])]
            root = row.request.kv_root
            keys = block_keys(tokens, self._limits.block_size, row.keys, root)
            for j in range(min(len(row.blocks), len(keys))):
                self._publish(row, j, keys, tokens)
        self._blocks.release(row.blocks)
        self._n_kv[row.slot] = 0
        self._free_slots.append(row.slot)
        del self._rows[row.request.key]
        self._prefilling.pop(row.request.key, None)
        self._chunks.pop(row.request.key, None)

    def _plan_prefill(self) -> None:
        for row in self._prefilling.values():
            if row.request.key not in self._chunks and self._budget > 0:
                self._plan_chunk(row)

    def _plan_chunk(self, row: _Row) -> None:
        """Schedule the next chunk of `row` and publish the blocks that it fills."""
        start = int(self._n_kv[row.slot])
        end = min(len(row.known), start + self._budget)
        self._chunks[row.request.key] = end
        self._budget -= end - start
        size = self._limits.block_size
        for j in range(start // size, end // size):
            self._publish(row, j, row.keys, row.known)

    def _publish(self, row: _Row, j: int, keys: list[bytes], tokens: Int32s) -> None:
        if row.epoch != self._epoch:
            return  # the blocks before this one are of other weights
        size = self._limits.block_size
        parent = keys[j - 1] if j else row.request.kv_root
        self._blocks.publish(row.blocks[j], keys[j], parent, tokens[j * size : (j + 1) * size])

    def _is_last_chunk(self, row: _Row) -> bool:
        return self._chunks[row.request.key] == len(row.known)

    def _groups(self) -> list[list[_Row]]:
        """Split planned rows into passes without much padding.

        The order stays: a row may share blocks that a row before it fills in this step.
        """
        groups: list[list[_Row]] = []
        longest = total = 0
        for key, end in self._chunks.items():
            row = self._prefilling[key]
            n = end - int(self._n_kv[row.slot])
            padded = (len(groups[-1]) + 1) * max(longest, n) if groups else 0
            if not groups or padded > 2 * (total + n) + 64:
                groups.append([])
                longest = total = 0
            groups[-1].append(row)
            longest, total = max(longest, n), total + n
        return groups

    def _prefill(self, group: list[_Row]) -> torch.Tensor:
        slots = _slots(group)
        starts = self._n_kv[slots]
        ends = np.array([self._chunks[row.request.key] for row in group])
        width = int((ends - starts).max())
        ids = np.zeros((len(group), width), np.int64)
        positions = np.full((len(group), width), PADDING, np.int64)
        for i, row in enumerate(group):
            start, end = int(starts[i]), int(ends[i])
            ids[i, width - (end - start) :] = row.known[start:end]
            positions[i, width - (end - start) :] = np.arange(start, end)
        self._n_kv[slots] = ends
        return self._forward.run(ids, positions, self._tables[slots], _adapters(group))

    def _decode(self, rows: list[_Row]) -> torch.Tensor:
        slots = _slots(rows)
        positions = self._n_kv[slots][:, None]
        self._n_kv[slots] += 1
        ids, tables = self._last[slots][:, None], self._tables[slots]
        return self._forward.run(ids, positions, tables, _adapters(rows))


def _slots(rows: list[_Row]) -> Slots:
    return np.array([row.slot for row in rows], np.int64)


def _problem_of(problem: Problem, request: EngineRequest) -> Problem:
    """The problem as its request reports it: the sampler does not know adapters."""
    is_broken = problem is BROKEN_WEIGHTS and request.adapter is not None
    return BROKEN_ADAPTER if is_broken else problem


def _adapters(rows: list[_Row]) -> Rows:
    """The adapter of each row; nothing if no row uses one."""
    adapters = [row.request.adapter for row in rows]
    return adapters if any(adapters) else ()


def _append(
    request: EngineRequest, token: int, wanted: TokenDetails | None
) -> FinishReason | Problem | None:
    """Append a request's next token; returns why it is complete or has failed, None: neither."""
    request.tokens.append(token)
    if request.wanted is not None and wanted is not None:
        request.wanted.rows.append(wanted)
    if request.grammar is not None and not request.grammar.accept(token):
        return OUT_OF_STEP
    return request.ending()
