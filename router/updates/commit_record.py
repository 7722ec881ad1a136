"""Writes the router's decision on an update to the store, and tries again until it is durable.

Spec: docs/protocol.md, "Weights", 2 and 3.
"""

from collections.abc import Callable
from typing import NamedTuple

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.messages.weights import RecordCommit, Settled, SettleVersion
from rolloutbus.router.context import Context, Waves
from rolloutbus.router.members.member_commands import (
    MemberCommand,
    MemberCommands,
    Results,
    result_of,
)
from rolloutbus.router.members.records import MemberRecord

OnWritten = Callable[[bool | None, float], None]
"""(it is written; False: it is not, and will not be; None: the store was asked and has not said
before the deadline; now)."""
SETTLE_S = 10.0
"""Before the store is asked again what became of a decision."""


class Decision(NamedTuple):
    """What is to be written, for one step of one update."""

    rid: str
    """Of the member command; names the step."""
    body: RecordCommit
    deadline_at: float
    on_written: OnWritten
    on_asked: Callable[[], None] = lambda: None
    """The store may have written it from now on; maybe more than once."""


class CommitRecorder:
    """Decisions under way to the store; those that it could not take yet are kept."""

    def __init__(self, context: Context, fleet: MemberCommands) -> None:
        self._context = context
        self._fleet = fleet
        self._waiting: dict[str, Decision] = {}
        self._asked: set[str] = set()
        """Decisions, by rid, that the store was asked for and has not answered."""
        self._doubts: dict[str, RecordCommit] = {}
        """Decisions, by rid, of which nobody knows whether the store has written them."""
        self._settling: set[str] = set()

    def write(self, decision: Decision, now: float) -> None:
        """Have it written, now or as soon as there is a store."""

        def done(results: Results, silent: list[str], at: float) -> None:
            if silent and at < decision.deadline_at:
                self._waiting[decision.rid] = decision  # the store will be back
                return
            was_asked = decision.rid in self._asked
            self._asked.discard(decision.rid)
            if silent and was_asked and not decision.body.is_adapter:
                self._doubts[decision.rid] = decision.body
                decision.on_written(None, at)
                return
            is_written = not silent and all(each.kind == "finished" for each in results.values())
            if is_written:
                self._context.recorded[decision.body.policy] = decision.body.version
            decision.on_written(is_written, at)

        store = self._context.members.store()
        if store is None:
            done({}, ["store"], now)
            return
        decision.on_asked()
        self._asked.add(decision.rid)
        packed = pack(decision.body)
        command = MemberCommand(decision.rid, "record_commit", packed, decision.deadline_at, done)
        self._fleet.start(command, [store], now)

    def is_in_doubt(self, policy: str, version: int) -> bool:
        """Whether only the store knows if this version is committed."""
        doubts = self._doubts.values()
        return any((each.policy, each.version) == (policy, version) for each in doubts)

    def forget(self, rid: str) -> None:
        """It need not be written any more; idempotent."""
        self._waiting.pop(rid, None)
        self._asked.discard(rid)

    def tick(self, now: float) -> None:
        """Try again what the store could not take; find out what it has written."""
        store = self._context.members.store()
        if store is not None:
            for rid, body in list(self._doubts.items()):
                if rid not in self._settling:
                    self._settling.add(rid)
                    self._settle(rid, body, store, now)
        waiting, self._waiting = self._waiting, {}
        for decision in waiting.values():
            self.write(decision, now)

    def _settle(self, rid: str, body: RecordCommit, store: MemberRecord, now: float) -> None:
        """Have the store say what became of a version; what it has not written it never will."""

        def done(results: Results, silent: list[str], _now: float) -> None:
            self._settling.discard(rid)
            if silent:
                return  # it is asked again
            del self._doubts[rid]
            found = [result_of("settle_version", each) for each in results.values()]
            is_committed = any(isinstance(each, Settled) and each.is_committed for each in found)
            if is_committed:
                self._context.recorded[body.policy] = body.version
                self._context.note_tag(body.policy, body.version, body.tag)
            if is_committed and body.floor:
                self._context.in_waves[body.policy] = Waves(body.version, body.floor)
            elif is_committed:
                self._context.note_commit(body.policy, body.version)

        packed = pack(SettleVersion(body.policy, body.version))
        command = MemberCommand(f"{rid}.s", "settle_version", packed, now + SETTLE_S, done)
        self._fleet.start(command, [store], now)
