"""Commands to members: sent to each target, re-sent until taken up, one result per target.

Spec: docs/protocol.md, "Commands to members".
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import Raw

from rolloutbus.bus.wire.codec import pack, unpack, unpack_result
from rolloutbus.bus.wire.commands import COMMANDS
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.limits import MAX_BODY_BYTES, MAX_SENTENCE_CHARS
from rolloutbus.bus.wire.messages.control import FleetOutcome, WorkerOutcome
from rolloutbus.bus.wire.messages.endings import Accepted, Ack, Problem
from rolloutbus.router.context import Context, why_no_store
from rolloutbus.router.members.records import MemberRecord

Results = dict[str, WorkerOutcome]
OnDone = Callable[[Results, list[str], float], None]
"""(results, silent members, now)."""
OnSilent = Callable[[str, float], None]
"""(name of a member that lives and does not answer, now)."""
OnResult = Callable[[MemberRecord, WorkerOutcome, float], None]
OnCommandResult = Callable[[Entry, MemberRecord, WorkerOutcome, float], None]
"""(command, member, how it ended there, now)."""

KEPT_S = 60.0
"""An answer is remembered this long, in case its client asks again."""
KEPT_MAX = 10_000
MAX_SHARES = 100_000
"""Shares of commands under way; clients name their deadlines, and members may take their time."""


@dataclass(slots=True)
class MemberCommand:
    """One command under way to one or more members."""

    rid: str
    kind: str
    body: Raw
    deadline_at: float
    on_done: OnDone
    on_result: OnResult | None = None
    bodies: dict[str, Raw] = field(default_factory=dict[str, Raw])
    """Member name -> what it is told instead of `body`."""
    waiting: dict[str, str] = field(default_factory=dict[str, str])
    """sub-rid -> member name."""
    results: Results = field(default_factory=dict[str, WorkerOutcome])
    silent: list[str] = field(default_factory=list[str])
    is_brought: bool = False
    """Who is lost meanwhile is brought it on coming back, and is not named as silent."""
    tells_deaths: bool = False
    """A member whose engine dies meanwhile has failed; otherwise it counts as silent."""


@dataclass(slots=True)
class _Part:
    """The share of one member in a command."""

    rid: str
    command: MemberCommand
    entry: Entry
    deadline_at: float
    resend_at: float
    n_sent: int = 1
    is_accepted: bool = False
    sent_at: float = 0.0


class Answers:
    """The latest answers to commands, by rid."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, Entry]] = {}

    def get(self, rid: str) -> Entry | None:
        """The answer to this command, if it is remembered."""
        kept = self._kept.get(rid)
        return None if kept is None else kept[1]

    def keep(self, answer: Entry, now: float) -> None:
        """Remember an answer."""
        self._kept[answer.rid] = now + KEPT_S, answer
        if len(self._kept) > KEPT_MAX:
            del self._kept[next(iter(self._kept))]

    def tick(self, now: float) -> None:
        """Forget the old ones."""
        while self._kept and next(iter(self._kept.values()))[0] <= now:
            del self._kept[next(iter(self._kept))]


class MemberCommands:
    """All member commands under way."""

    def __init__(self, context: Context, on_silent: OnSilent) -> None:
        self._context = context
        self._on_silent = on_silent
        self._commands: dict[str, MemberCommand] = {}
        self._parts: dict[str, _Part] = {}
        self._done = Answers()
        self._watchers: dict[str, OnCommandResult] = {}

    def watch(self, kind: str, on_result: OnCommandResult) -> None:
        """Hear of each result of clients' commands of this kind."""
        self._watchers[kind] = on_result

    def __len__(self) -> int:
        return len(self._commands)

    def has_room(self, n_members: int) -> bool:
        """Whether a command to so many members may be begun."""
        return len(self._parts) + n_members <= MAX_SHARES

    def is_asked(self, member: MemberRecord, kinds: Collection[str]) -> bool:
        """Whether a command of one of these kinds is under way to this member."""
        parts = (self._parts.get(rid) for rid in member.commands)
        return any(part is not None and part.command.kind in kinds for part in parts)

    def is_known(self, client: str, rid: str) -> bool:
        """Whether this rid, which must be the client's own, is under way or done.

        A done one is answered again.
        """
        done = self._done.get(rid)
        if done is not None:
            self._context.to_client(client, done)
        return done is not None or rid in self._commands

    def ask(
        self,
        client: str,
        entry: Entry,
        targets: Sequence[MemberRecord],
        now: float,
        absent: Sequence[str] = (),
        *,
        is_brought: bool = False,
    ) -> None:
        """A client's command to members; answered with one `finished(FleetOutcome)`.

        `absent`: workers that should get it and are not there; they are named as silent.
        `is_brought`: see `MemberCommand`.
        """

        def answer(results: Results, silent: list[str], at: float) -> None:
            body = pack(FleetOutcome(list(results.values()), [*silent, *absent]))
            reply = Entry("finished", entry.rid, body=body)
            if len(body) > MAX_BODY_BYTES:
                why = f"{len(results)} answers of {len(body)} bytes; {MAX_BODY_BYTES} can be sent"
                problem = Problem("internal", why, "failed")
                reply = Entry("failed", entry.rid, body=pack(problem))
            if entry.kind != "repair":  # large, and may as well be asked for anew
                self._done.keep(reply, at)
            self._context.to_client(client, reply)

        deadline_at = now + entry.deadline_ms / 1000
        watcher = self._watchers.get(entry.kind)
        on_result = None if watcher is None else partial(watcher, entry)
        command = MemberCommand(entry.rid, entry.kind, entry.body, deadline_at, answer, on_result)
        command.is_brought, command.tells_deaths = is_brought, not is_brought
        self.start(command, targets, now)

    def start(self, command: MemberCommand, targets: Sequence[MemberRecord], now: float) -> None:
        """Send a command to its targets."""
        self._commands[command.rid] = command
        for member in targets:
            self._send_first(command, member, now)
        self._finish_if_complete(command, now)

    def abandon(self, rid: str) -> None:
        """Forget a command if it is under way; its end is not reported."""
        command = self._commands.pop(rid, None)
        if command is None:
            return
        for sub_rid, name in command.waiting.items():
            self._parts.pop(sub_rid, None)
            member = self._context.members.named(name)
            if member is not None:
                member.commands.discard(sub_rid)

    def accepted(self, body: Accepted) -> None:
        """Members took these up: no need to send them again."""
        for rid, attempt in body.items:
            part = self._parts.get(rid)
            if part is not None and part.entry.attempt == attempt:
                part.is_accepted = True

    def ended(self, member: MemberRecord, entry: Entry, now: float) -> None:
        """A member's ending: keep it, acknowledge it."""
        ack = pack(Ack([(entry.rid, entry.attempt)]))
        self._context.to_member(member, "ack", ack)
        part = self._parts.get(entry.rid)
        if part is None or part.entry.attempt != entry.attempt:
            return
        outcome = WorkerOutcome(member.name, entry.kind, entry.body)
        self._settle(part, member, outcome, now)

    def member_lost(self, member: MemberRecord, now: float, death: str = "") -> None:
        """A member is gone: its shares end as silent, or as failed if `death` says why."""
        for rid in sorted(member.commands):
            part = self._parts.get(rid)
            if part is not None:
                self._context.count("silent_members")
                outcome = None
                if death and part.command.tells_deaths:
                    outcome = _died_with(member, part.command.kind, death)
                self._settle(part, member, outcome, now, is_lost=True)
        member.commands.clear()

    def tick(self, now: float) -> None:
        """Time passes: re-send what was not taken up, give up at the deadline."""
        for part in list(self._parts.values()):
            member = self._context.members.named(part.command.waiting.get(part.rid, ""))
            if member is None or part.deadline_at <= now:
                self._blame(part, member, now)
                self._settle(part, member, None, now)
            elif not part.is_accepted and part.resend_at <= now:
                part.n_sent += 1
                part.resend_at = now + self._context.settings.leases.resend_after(part.n_sent)
                self._context.out.send(member.peer, part.entry)
        self._done.tick(now)

    def _send_first(self, command: MemberCommand, member: MemberRecord, now: float) -> None:
        sub_rid = f"{command.rid}@{member.name}"
        left_ms = max(1, int((command.deadline_at - now) * 1000))
        entry = Entry(
            command.kind,
            sub_rid,
            self._context.next_attempt(),
            member.epoch,
            "",
            left_ms,
            None,
            command.bodies.get(member.name, command.body),
        )
        first_s = self._context.settings.leases.resend_first_s
        self._parts[sub_rid] = _Part(
            sub_rid, command, entry, command.deadline_at, now + first_s, sent_at=now
        )
        command.waiting[sub_rid] = member.name
        member.commands.add(sub_rid)
        self._context.out.send(member.peer, entry)

    def _blame(self, part: _Part, member: MemberRecord | None, now: float) -> None:
        """A worker that had the time of a lease and said nothing is failing.

        One that prepares an update cannot, while there is no store to take it from.
        """
        if part.entry.kind == "prepare_update" and why_no_store(self._context, now):
            return
        had_time = now - part.sent_at >= self._context.settings.leases.lease_s
        if member is not None and member.role == "worker" and had_time:
            self._on_silent(member.name, now)

    def _settle(
        self,
        part: _Part,
        member: MemberRecord | None,
        outcome: WorkerOutcome | None,
        now: float,
        *,
        is_lost: bool = False,
    ) -> None:
        command = part.command
        self._parts.pop(part.rid, None)
        name = command.waiting.pop(part.rid, "")
        if member is not None:
            member.commands.discard(part.rid)
        if outcome is None:
            if not (is_lost and command.is_brought):
                command.silent.append(name)
        else:
            command.results[name] = outcome
            if command.on_result is not None and member is not None:
                command.on_result(member, outcome, now)
        self._finish_if_complete(command, now)

    def _finish_if_complete(self, command: MemberCommand, now: float) -> None:
        if not command.waiting and self._commands.pop(command.rid, None) is not None:
            command.on_done(command.results, command.silent, now)


def _died_with(member: MemberRecord, kind: str, death: str) -> WorkerOutcome:
    """The ending of a command whose engine died before it had ended it."""
    if "lasting" in COMMANDS[kind].traits:
        outcome, effect = "unknown", "some of what it does may have been done, and stay"
    else:
        outcome, effect = "failed", "nothing that it may have done has stayed"
    message = f"{death}; {kind} had not ended, and {effect}"
    problem = Problem("engine_died", message[:MAX_SENTENCE_CHARS], outcome)
    return WorkerOutcome(member.name, "failed", pack(problem))


def is_share(rid: str) -> bool:
    """Whether this rid names one member's share of a command; clients cannot use such a rid."""
    return "@" in rid


def result_of(kind: str, outcome: WorkerOutcome) -> object:
    """The typed body of a member's ending of such a command; None if it cannot be read."""
    entry = Entry(outcome.kind, body=outcome.body)
    try:
        return unpack_result(kind, entry) if outcome.kind == "finished" else unpack(entry)
    except RemoteProtocolError:
        return None


def problem_of(kind: str, outcome: WorkerOutcome) -> str:
    """Why a member did not finish such a command, in a few words."""
    body = result_of(kind, outcome)
    if isinstance(body, Problem):
        return f"{body.code}: {body.message}"[:MAX_SENTENCE_CHARS]
    return outcome.kind
