"""Prefix affinity: which worker has which prompt prefixes cached, and what that is worth.

Spec: docs/protocol.md, "Prefix affinity".
"""

from collections.abc import Iterable, Iterator, Sequence

from rolloutbus.bus.backoff import Chance
from rolloutbus.bus.prefix_hashes import MARKED_TOKENS, unpacked
from rolloutbus.bus.wire.codec import unpack_as
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.membership import Prefixes
from rolloutbus.router.context import Context
from rolloutbus.router.members.records import MemberRecord
from rolloutbus.router.placement.placement import Rest
from rolloutbus.router.requests.record import Request

MARKS_PER_WORKER = 16_384
MARKS_IN_ALL = 1_000_000
"""Of all workers together: some 200 MB."""
ENOUGH = 8
"""Holders of a beginning that are compared, at most: thousands may have the same system prompt."""
REQUEST_TOKENS = 128
"""Cached tokens of a prompt that one request more at a worker outweighs; simulated fleets of 2 to
16 did best with 64 to 256. The tokens under way do not count: clients tell how many a request may
sample, which is mostly far more than it will, and prompts that are cached cost little."""
MOST_AHEAD = 8
"""Requests that a worker may have more than the one that load chose, however much it has cached.
With 16,000 tokens of one system prompt it would be 125, and workers that are cold stay cold: half
of a simulated fleet had nothing to do."""
MAX_EXPECTED = 2048
"""Marks of prompts that were sent to a worker, which has not told of them yet."""
MISSED = -1
"""Instead of the next number: nothing counts until the worker begins anew."""


class PrefixIndex:
    """Mark -> workers, and the choice among them."""

    def __init__(self, context: Context, chance: Chance) -> None:
        self._context = context
        self._chance = chance
        self._holders: dict[int, list[MemberRecord]] = {}
        self._tellers: set[str] = set()
        """Workers that have told of their caches in their present lease."""
        self._n_marks = 0
        """Those of several workers as often."""

    def told(self, worker: MemberRecord, entry: Entry, _now: float) -> None:
        """A worker says what has come into its cache and what has left it."""
        body = unpack_as(Prefixes, entry)
        if worker.role != "worker" or entry.epoch != worker.epoch:
            self._context.count("stale_prefixes")
            return
        if not body.seq:
            self._forget(worker)
            worker.prefixes_seq = 0
            self._tellers.add(worker.name)
            self._ask_clients()
        if body.seq != worker.prefixes_seq:
            self._forget(worker)
            worker.prefixes_seq = MISSED
            self._context.count("prefix_gaps")
            return
        worker.prefixes_seq += 1
        for mark in unpacked(body.removed):
            self._remove(worker, mark)
        for mark in unpacked(body.added):
            self._add(worker, mark)

    def worker_lost(self, worker: MemberRecord) -> None:
        """Its lease is over."""
        if worker.name in self._tellers:
            self._forget(worker)
            self._tellers.discard(worker.name)
            self._ask_clients()

    def choose(self, rest: Rest, request: Request, now: float) -> MemberRecord | None:
        """Take the worker that load chooses, or one whose cached prompt is worth more."""
        worker = rest(request, now)
        if worker is None or not request.place.marks:
            return worker
        return self.warmest(request, worker)

    def warmest(self, request: Request, default: MemberRecord) -> MemberRecord:
        """The worker with a free place whose cache outweighs its load, or else `default`."""
        policy, rule = request.place.policy, request.rule
        known = unpacked(request.place.marks)
        best = default
        price = REQUEST_TOKENS * len(default.requests) - _cached_tokens(default, known)
        most = len(default.requests) + MOST_AHEAD
        for worker, n_cached in self._longest_first(known):
            if len(worker.requests) > most:
                continue
            if default.has_free_slot and not worker.has_free_slot:
                continue  # a prompt is computed sooner than a generation ends
            offer = REQUEST_TOKENS * len(worker.requests) - n_cached
            is_free = worker.free_index >= 0 and worker.policy == policy
            if offer < price and is_free and self._context.may_serve(worker, rule):
                best, price = worker, offer
        if best is not default:
            self._context.count("prefix_affinity")
        self._expect(best, known)
        return best

    def _expect(self, worker: MemberRecord, marks: Sequence[int]) -> None:
        """It gets the prompt now; others with the same beginning may come before it tells so."""
        if worker.name not in self._tellers:
            return
        for mark in marks:
            if mark not in worker.marks and self._add(worker, mark):
                worker.marks_expected[mark] = None
        while len(worker.marks_expected) > MAX_EXPECTED:
            self._remove(worker, next(iter(worker.marks_expected)))

    def check_invariants(self, members: Iterable[MemberRecord]) -> None:
        """Assert that both directions agree, and that no worker is remembered that is gone."""
        live = {member.name: member for member in members}
        held = {(mark, name) for name, member in live.items() for mark in member.marks}
        assert held == {(mark, each.name) for mark, all_ in self._holders.items() for each in all_}
        assert all(each is live[each.name] for all_ in self._holders.values() for each in all_)
        assert self._n_marks == len(held) == sum(map(len, self._holders.values()))
        assert all(member.marks_expected.keys() <= member.marks for member in live.values())
        assert self._context.wants_marks == bool(self._tellers)
        assert self._tellers <= live.keys()

    def _longest_first(self, marks: Sequence[int]) -> Iterator[tuple[MemberRecord, int]]:
        """Holders of a beginning and the tokens of their longest; not many, the longest first."""
        seen: set[str] = set()
        for index in range(min(len(marks), len(MARKED_TOKENS)) - 1, -1, -1):
            holders = self._holders.get(marks[index], [])
            for holder in holders if len(holders) <= ENOUGH else self._some(holders):
                if holder.name not in seen:
                    seen.add(holder.name)
                    yield holder, MARKED_TOKENS[index]
            if len(seen) >= ENOUGH:
                return

    def _some(self, holders: list[MemberRecord]) -> list[MemberRecord]:
        """Others each time."""
        start = int(self._chance.random() * len(holders))
        return [holders[(start + n) % len(holders)] for n in range(ENOUGH)]

    def _ask_clients(self) -> None:
        """They are to know whether marks are of any use."""
        context = self._context
        if context.wants_marks != bool(self._tellers):
            context.wants_marks, context.has_member_news = bool(self._tellers), True

    def _forget(self, worker: MemberRecord) -> None:
        for mark in list(worker.marks):
            self._remove(worker, mark)

    def _add(self, worker: MemberRecord, mark: int) -> bool:
        """False: there is no room for it."""
        worker.marks_expected.pop(mark, None)
        if mark in worker.marks:
            return True
        if len(worker.marks) >= MARKS_PER_WORKER or self._n_marks >= MARKS_IN_ALL:
            self._context.count("prefixes_not_kept")
            return False
        worker.marks.add(mark)
        self._holders.setdefault(mark, []).append(worker)
        self._n_marks += 1
        return True

    def _remove(self, worker: MemberRecord, mark: int) -> None:
        if mark not in worker.marks:
            return
        worker.marks.discard(mark)
        worker.marks_expected.pop(mark, None)
        self._n_marks -= 1
        holders = self._holders[mark]
        if len(holders) == 1:
            del self._holders[mark]
        else:
            holders.remove(worker)


def _cached_tokens(worker: MemberRecord, marks: Sequence[int]) -> int:
    """Tokens of a prompt that a worker has cached, by its own reports."""
    held = worker.marks
    if not held:
        return 0
    lengths = zip(marks, MARKED_TOKENS, strict=False)
    return max((n_tokens for mark, n_tokens in lengths if mark in held), default=0)
