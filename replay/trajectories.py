"""Rollouts out of a journal: what was asked for, what came of it, by which weights, and when.

Pure; arrays are numpy's. Spec: docs/journal.md.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, cast

import msgspec
import numpy as np

from rolloutbus.bus.streams.tap import TapEvent
from rolloutbus.bus.wire.codec import unpack_as, unpack_result
from rolloutbus.bus.wire.commands import ENDINGS
from rolloutbus.bus.wire.entry import NO_ATTEMPT, Attempt, Entry, Placement
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.generation import Generate, Generated
from rolloutbus.replay.journal.records import Head, Record, Stream, Tap

NS = 1e-9
NO_TAP = (
    "holds no messages of a router's tap, which rollouts come from: record a fleet that has one "
    "(`rolloutbus up --tap`)"
)
"""What is said of a journal whose records had none."""
MAX_DONE = 100_000
"""Ended rollouts that are remembered, so that no copy of an ending is taken for another."""

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]
Floats = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass(slots=True)
class Trajectory:
    """One finished rollout."""

    rid: str
    client: str
    session: str
    """Empty: it belonged to none."""
    group: str
    """Of the samples of one prompt; empty: none was named."""
    policy: str
    lora: str
    """Adapter that sampled, `NAME@VERSION` as the engine told; empty: none, or it was not told."""
    prompt_ids: Ints
    """int32 [n_prompt_tokens]."""
    output_ids: Ints
    """int32 [n]."""
    logprobs: Floats
    """float32 [n]: after temperature and penalties, before truncation."""
    behaviour_logprobs: Floats
    """float32 [n]: over the support that was sampled from; `logprobs` if nothing truncates."""
    run_versions: list[int]
    """Weight version of each run of output tokens."""
    run_lengths: list[int]
    """Tokens of each run; they sum to n."""
    finish_reason: str
    worker: str
    """Name of the worker that sent the result."""
    n_attempts: int
    """Times that it was given to a worker; 0: that was not heard."""
    n_resumed: int
    """Tokens that the last attempt began with."""
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    asked_at: float
    """Unix time, seconds, when the router had it."""
    ended_at: float
    """Unix time, seconds, when its client was told."""
    queue_ms: float
    """At the worker."""
    run_ms: float
    prompt_text: str | None = None
    """None unless a tokenizer was given."""
    output_text: str | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """One request and its result; times as in a `Trajectory`."""

    rid: str
    generate: Generate
    """As its client sent it first."""
    place: Placement
    result: Generated
    worker: str = ""
    n_attempts: int = 0
    asked_at: float = 0.0
    ended_at: float = 0.0


class _Asked(NamedTuple):
    """A request under way."""

    generate: Generate
    place: Placement
    asked_at: float
    attempts: set[Attempt]


class AnsweredRequests:
    """Reads records; an iterator of the requests that finished, in the order of their ends."""

    def __init__(self, records: Iterable[Record], rids: AbstractSet[str] = frozenset()) -> None:
        """`rids`: of these only; empty: of all."""
        self._records = records
        self._rids = rids
        self._open: dict[str, _Asked] = {}
        self._stopped: OrderedDict[str, _Asked] = OrderedDict()
        """Those that ended otherwise than well; a client goes on with one under the same rid."""
        self._done: OrderedDict[str, None] = OrderedDict()
        self._wall_minus_boot_ns = 0
        self._n_forgotten = 0
        self._has_tap = False
        self._has_streams = False
        self.n_headless = 0
        """Requests that finished, but were asked for before the recording began."""
        self.n_malformed = 0

    @property
    def lacks_tap(self) -> bool:
        """Whether tokens were streamed, and no message of a router's tap was among the records."""
        return self._has_streams and not self._has_tap

    @property
    def n_unfinished(self) -> int:
        """Requests that ended otherwise, and were not gone on with."""
        return len(self._stopped) + self._n_forgotten

    @property
    def n_open(self) -> int:
        """Requests of which no ending was heard."""
        return len(self._open)

    def __iter__(self) -> Iterator[Answered]:
        """Raises JournalDamaged as the journal that the records come from."""
        for record in self._records:
            if isinstance(record, Head):
                self._wall_minus_boot_ns = record.wall_ns - record.at_ns
            if isinstance(record, Stream):
                self._has_streams = True
            if not isinstance(record, Tap):
                continue
            self._has_tap = True
            at = (record.at_ns + self._wall_minus_boot_ns) * NS
            for entry in record.entries:
                if self._rids and entry.rid not in self._rids:
                    continue
                try:
                    found = self._heard(record.event, entry, at)
                except RemoteProtocolError:
                    self.n_malformed += 1
                    continue
                if found is not None:
                    yield found

    def _heard(self, event: TapEvent, entry: Entry, at: float) -> Answered | None:
        if entry.kind == "generate":
            self._generate(event, entry, at)
        elif event == "sent" and entry.kind in ENDINGS and entry.attempt != NO_ATTEMPT:
            return self._ended(entry, at)
        elif event == "sent" and entry.kind in ENDINGS:
            self._stop(entry.rid)  # the router itself ended it
        return None

    def _generate(self, event: TapEvent, entry: Entry, at: float) -> None:
        asked = self._open.get(entry.rid)
        is_known = asked is not None or entry.rid in self._done
        if event == "sent":
            if asked is not None:
                asked.attempts.add(entry.attempt)
        elif event == "received" and entry.rid in self._stopped:
            self._open[entry.rid] = self._stopped.pop(entry.rid)
        elif event == "received" and not is_known and entry.place is not None:
            generate = unpack_as(Generate, entry)
            self._open[entry.rid] = _Asked(generate, entry.place, at, set())

    def _stop(self, rid: str) -> None:
        asked = self._open.pop(rid, None)
        if asked is not None:
            self._stopped[rid] = asked
            if len(self._stopped) > MAX_DONE:
                self._stopped.popitem(last=False)
                self._n_forgotten += 1

    def _ended(self, entry: Entry, at: float) -> Answered | None:
        """An ending on its way to a client; the first good one counts, others are copies of it."""
        if entry.rid in self._done:
            return None
        if entry.kind != "finished":
            self._stop(entry.rid)
            return None
        asked = self._open.pop(entry.rid, None) or self._stopped.pop(entry.rid, None)
        if asked is None:
            self.n_headless += _is_generated(entry)
            return None
        self._done[entry.rid] = None
        if len(self._done) > MAX_DONE:
            self._done.popitem(last=False)
        result = cast("Generated", unpack_result("generate", entry))
        if len(ints(result.tokens)) != len(floats(result.logprobs)):
            raise RemoteProtocolError("a result with columns of unequal length")
        ints(asked.generate.prompt)
        floats(result.behaviour_logprobs)
        generate, place, asked_at, attempts = asked
        return Answered(
            entry.rid, generate, place, result, entry.route, len(attempts), asked_at, at
        )


class Trajectories:
    """Reads records; an iterator of a row for each rollout that finished."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.requests = AnsweredRequests(records)

    def __iter__(self) -> Iterator[Trajectory]:
        """In the order of their ends. Raises JournalDamaged as the records' journal."""
        return map(_row, self.requests)


def _row(answered: Answered) -> Trajectory:
    generate, place, result = answered.generate, answered.place, answered.result
    sampling = generate.sampling
    return Trajectory(
        rid=answered.rid,
        client=answered.rid.rpartition("/")[0],
        session=place.session,
        group=place.group,
        policy=place.policy,
        lora=result.lora,
        prompt_ids=ints(generate.prompt),
        output_ids=ints(result.tokens),
        logprobs=floats(result.logprobs),
        behaviour_logprobs=floats(result.behaviour_logprobs or result.logprobs),
        run_versions=[version for version, _ in result.versions],
        run_lengths=[count for _, count in result.versions],
        finish_reason=result.finish_reason,
        worker=answered.worker,
        n_attempts=answered.n_attempts,
        n_resumed=result.n_resumed,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.sampling_seed,
        asked_at=answered.asked_at,
        ended_at=answered.ended_at,
        queue_ms=result.queue_ms,
        run_ms=result.run_ms,
    )


def ints(column: bytes) -> Ints:
    """int32 [n]. Raises RemoteProtocolError: these are no numbers of four bytes."""
    return np.frombuffer(_whole(column), "<i4")


def floats(column: bytes) -> Floats:
    """float32 [n]; raises as `ints`."""
    return np.frombuffer(_whole(column), "<f4")


def _whole(column: bytes) -> bytes:
    if len(column) % 4:
        raise RemoteProtocolError(f"a column of {len(column)} bytes")
    return column


def _is_generated(entry: Entry) -> bool:
    try:
        return isinstance(unpack_result("generate", entry), Generated)
    except (RemoteProtocolError, msgspec.DecodeError):
        return False
