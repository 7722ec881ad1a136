"""The judge of a run: each request ended once, as it may, and with the right tokens.

It reads what clients wrote and nothing else: no counter, table or check of the product.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from rolloutbus.engine_worker.engines.fake.engine import prompt_digest, token_after
from tests.drills.chaos.ledger import Ledger
from tests.drills.chaos.records import Ended, Invoked, Looked, Progressed, Record

Tokens = list[int]
Oracle = Callable[[Invoked, list[int]], Tokens]
"""(request, version of each token) -> the tokens that must have come."""

POISON_CODES = frozenset({"engine_crashed", "poison"})
LOSS_CODES = frozenset({"unknown_request", "worker_lost", "PeerLost"})
MAX_STORIES = 5
MAX_LINES = 12
"""Of one story."""


@dataclass(slots=True)
class Life:
    """All that the history says of one request."""

    invoked: list[Invoked] = field(default_factory=list[Invoked])
    progressed: list[Progressed] = field(default_factory=list[Progressed])
    ended: list[Ended] = field(default_factory=list[Ended])
    is_excused: bool = False
    """Its caller was killed, and may have heard of no outcome."""
    collected: list[Ended] = field(default_factory=list[Ended])
    """What later processes of its caller's name found of it."""
    is_owed: bool = False
    """It is detached, and nothing has happened that it may be lost with."""

    def join(self, other: "Life") -> None:
        """What another process says of the same request."""
        self.invoked += other.invoked
        self.progressed += other.progressed
        self.ended += other.ended
        self.collected += other.collected
        self.is_excused |= other.is_excused


@dataclass(slots=True)
class Verdict:
    """What was found; names of requests by what is wrong with them."""

    n_requests: int = 0
    n_ok: int = 0
    n_streamed: int = 0
    n_moved: int = 0
    """Ended well after more than one attempt."""
    n_unwanted: int = 0
    """Cancelled or lost as they were allowed to be."""
    n_behind: int = 0
    """They took any weights, and got some that had been replaced before."""
    n_excused: int = 0
    """Open when their caller was killed."""
    n_collected: int = 0
    """Detached ones of these that a later process has the end of."""
    lost: list[str] = field(default_factory=list[str])
    """Without an outcome, or not in time."""
    duplicated: list[str] = field(default_factory=list[str])
    """With two outcomes, or with the outcome of another request."""
    wrong_tokens: list[str] = field(default_factory=list[str])
    stale: list[str] = field(default_factory=list[str])
    """It asked for the latest weights, and got some that had been replaced before, or older ones
    after newer ones."""
    poisoned: list[str] = field(default_factory=list[str])
    """Innocent, and blamed for crashes."""
    failed: list[str] = field(default_factory=list[str])
    """Any other ending that was not allowed."""
    stories: list[str] = field(default_factory=list[str])
    """What happened to the first ones."""

    @property
    def n_violations(self) -> int:
        """0 is what a run must show."""
        wrong = (self.lost, self.duplicated, self.wrong_tokens, self.stale)
        return sum(map(len, (*wrong, self.poisoned, self.failed)))


def fake_oracle(request: Invoked, versions: list[int]) -> Tokens:
    """What the fake engine must have said."""
    digest = prompt_digest(request.prompt)
    return [token_after(digest, request.seed, i, version) for i, version in enumerate(versions)]


def lives_of(records: Iterable[Record], *, is_excused: bool = False) -> dict[str, Life]:
    """Records by request, each kind in the order of its file.

    Args:
        records: of whole processes: no request is told of in two calls.
        is_excused: those processes were killed by the drill.
    """
    lives: dict[str, Life] = {}
    for record in records:
        if isinstance(record, Looked):
            continue
        if isinstance(record, Ended) and record.is_collected:
            lives.setdefault(record.op, Life()).collected.append(record)
            continue
        life = lives.setdefault(record.op, Life(is_excused=is_excused))
        match record:
            case Invoked():
                life.invoked.append(record)
            case Progressed():
                life.progressed.append(record)
            case Ended():
                life.ended.append(record)
    return lives


def judge(
    lives: dict[str, Life], oracle: Oracle = fake_oracle, ledger: Ledger | None = None
) -> Verdict:
    """The verdict on a history.

    Args:
        lives: see `lives_of`.
        oracle: knows the right tokens.
        ledger: what was published; None: nothing.
    """
    verdict = Verdict(n_requests=len(lives))
    ledger = ledger or Ledger()
    rids: dict[str, str] = {}
    for op, life in lives.items():
        for wrong, why in _complaints(life, oracle, ledger, rids):
            ops: list[str] = getattr(verdict, wrong)
            if op not in ops:
                ops.append(op)
            if len(verdict.stories) < MAX_STORIES:
                verdict.stories.append(_story(op, life, why))
        verdict.n_excused += life.is_excused and not life.ended
        verdict.n_collected += any(not _is_loss(each) for each in life.collected)
        verdict.n_streamed += any(each.is_streamed for each in life.invoked)
        for ended in life.ended[:1]:
            verdict.n_ok += ended.outcome == "ok"
            verdict.n_moved += ended.outcome == "ok" and ended.n_attempts > 1
            verdict.n_unwanted += ended.outcome != "ok"
            verdict.n_behind += any(_stale_tokens(each, ended, ledger) for each in life.invoked)
    return verdict


def _complaints(
    life: Life, oracle: Oracle, ledger: Ledger, rids: dict[str, str]
) -> Iterable[tuple[str, str]]:
    """(list of the verdict, why) for each thing that is wrong with one request."""
    if len(life.invoked) != 1:
        yield "duplicated", f"it was asked {len(life.invoked)} times"
        return
    [request] = life.invoked
    if not life.ended and not life.is_excused:
        yield "lost", "no outcome"
    if len(life.ended) > 1:
        yield "duplicated", f"{len(life.ended)} outcomes"
    found = [each for each in life.collected if not _is_loss(each)]
    if life.is_owed and not life.ended and not found:
        yield "lost", "it was detached, and nobody has its end"
    if found and not life.is_excused:
        yield "duplicated", "it was collected while its caller lived"
    if len({each.tokens for each in (*life.ended, *found) if each.outcome == "ok"}) > 1:
        yield "duplicated", "its ends differ"
    for ended in (*life.ended, *found):
        if ended.rid and rids.setdefault(ended.rid, ended.op) != ended.op:
            yield "duplicated", f"{ended.rid} was also the outcome of {rids[ended.rid]}"
        if ended.outcome not in ("ok", *request.allowed) and not _is_stopped(ended):
            yield _fault_of(ended), f"{ended.outcome} {ended.code}"
        if ended.outcome in ("ok", "cancelled"):
            if why := _wrong_tokens(request, ended, oracle, ledger):
                yield "wrong_tokens", why
            why = _stale_tokens(request, ended, ledger)
            if why and request.wants_latest:
                yield "stale", why
    held = [each.at for each in (*life.invoked, *life.progressed, *life.ended)]
    if any(later < earlier for earlier, later in pairwise(held)):
        yield "duplicated", "something came after the outcome"


def _is_loss(ended: Ended) -> bool:
    """Whether what was to be collected was gone with those who held it."""
    return ended.is_collected and ended.code in LOSS_CODES


def _is_stopped(ended: Ended) -> bool:
    """Whether a weight update stopped what nobody could begin again: no router has its prompt."""
    return ended.is_collected and ended.outcome == "cancelled"


def _fault_of(ended: Ended) -> str:
    if ended.code in POISON_CODES:
        return "poisoned"
    return "lost" if ended.outcome in ("expired", "lost") else "failed"


def _wrong_tokens(request: Invoked, ended: Ended, oracle: Oracle, ledger: Ledger) -> str:
    got = _tokens(ended.tokens)
    if ended.outcome == "ok" and len(got) != request.n_tokens:
        return f"{len(got)} tokens instead of {request.n_tokens}"
    by_token = [version for version, n_tokens in ended.versions for _ in range(n_tokens)]
    if len(by_token) != len(got):
        return f"versions of {len(by_token)} tokens for {len(got)}"
    if unknown := sorted({*by_token} - ledger.servable):
        return f"versions that never were: {unknown}"
    wanted = oracle(request, by_token)
    if got != wanted:
        place = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b)
        return f"token {place} is {got[place]} instead of {wanted[place]}"
    if ended.n_gaps:
        return f"its stream left tokens out {ended.n_gaps} times"
    if ended.streamed is not None and ended.streamed != ended.tokens:
        return f"{len(_tokens(ended.streamed))} streamed tokens are not those of the result"
    return ""


def _stale_tokens(request: Invoked, ended: Ended, ledger: Ledger) -> str:
    versions = [version for version, _ in ended.versions]
    floor = ledger.floor(request.at)
    if versions and min(versions) < floor:
        return f"version {min(versions)} after {floor} was committed"
    if versions != sorted(versions):
        return f"its versions go back: {versions}"
    return ""


def _tokens(raw: bytes) -> Tokens:
    tokens: Tokens = np.frombuffer(raw, "<i4").tolist()
    return tokens


def _story(op: str, life: Life, why: str) -> str:
    """The life of a request for people, times from its first record."""
    records: list[Invoked | Progressed | Ended] = sorted(
        [*life.invoked, *life.progressed, *life.ended, *life.collected],
        key=lambda record: record.at,
    )
    lines = [f"{op}: {why}"]
    begin = records[0].at
    last_worker = ""
    for record in records:
        match record:
            case Invoked():
                what = f"asked for {record.n_tokens} tokens, seed {record.seed}"
            case Progressed(worker=worker) if worker == last_worker:
                continue
            case Progressed():
                last_worker = record.worker
                what = f"{record.n_tokens} tokens, from {record.worker} now"
            case _:
                what = f"{record.outcome} {record.code} {record.rid} by {record.worker}"
        lines.append(f"  {begin:.3f} + {record.at - begin:7.3f} s  {what}")
    return "\n".join([*lines[:MAX_LINES], *lines[MAX_LINES:][-1:]])
