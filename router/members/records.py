"""Workers and stores as the router sees them: their records, leases and life cycle."""

import enum
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

from rolloutbus.bus.actor.effects import next_state
from rolloutbus.bus.membership.outbox import MAX_NEWS
from rolloutbus.bus.wire.entry import AttemptKey, Peer, RequestId
from rolloutbus.bus.wire.messages.membership import Heartbeat, Hello, Member, Role

TERMS = 10
"""A worker that was lost is expected back for so many lease terms."""
MAX_LOST = 1000
"""More lost workers than this are not remembered; the oldest go first."""
SMALL_OUTBOX = 256
"""Members with fewer endings than that, of all clients together, are not laden."""
LEFT = frozenset({"shutdown", "left"})
"""Farewells of workers that do not come back by themselves."""


class _Absent(NamedTuple):
    policy: str
    why: str
    until: float


class ExpectedWorkers:
    """Workers that are not on the bus and are counted all the same. Pure; `now` is in seconds."""

    def __init__(self, launched: Mapping[str, str], lease_s: float) -> None:
        """Expect the launched ones, worker -> policy, until they leave in good order."""
        self._launched = dict(launched)
        self._patience_s = TERMS * lease_s
        self._absent = {
            name: _Absent(policy, "it was launched and has not joined yet", float("inf"))
            for name, policy in launched.items()
        }
        self._told_to_leave: dict[str, bool] = {}
        """Workers that are here and were told to leave -> whether they are to come back."""

    @property
    def are_told(self) -> bool:
        """Whether they are known from the start, not only once they were seen."""
        return bool(self._launched)

    def joined(self, name: str) -> None:
        """It is on the bus."""
        self._absent.pop(name, None)
        self._told_to_leave.pop(name, None)

    def told_to_leave(self, name: str, *, comes_back: bool) -> None:
        """Somebody told it so; it leaves, or dies before it could."""
        self._told_to_leave[name] = comes_back

    def forget(self, name: str) -> bool:
        """Stops expecting a worker. Returns False if it was not expected."""
        self._launched.pop(name, None)
        return self._absent.pop(name, None) is not None

    def lost(self, name: str, policy: str, reason: str, now: float) -> None:
        """It is not on the bus any more."""
        comes_back = self._told_to_leave.pop(name, None)
        self._absent.pop(name, None)
        if comes_back:
            why = "it was told to leave and come back"
            self._absent[name] = _Absent(policy, why, float("inf"))
            return
        if comes_back is False or reason in LEFT:
            self._launched.pop(name, None)
            return
        until = float("inf") if name in self._launched else now + self._patience_s
        self._absent[name] = _Absent(policy, f"it was lost ({reason})", until)
        if len(self._absent) > MAX_LOST + len(self._launched):
            oldest = next(each for each in self._absent if each not in self._launched)
            del self._absent[oldest]

    def tick(self, now: float) -> None:
        """Give up those that stayed away for too long."""
        for name in [name for name, each in self._absent.items() if each.until <= now]:
            del self._absent[name]

    def missing(self, policy: str) -> dict[str, str]:
        """Workers of the policy that are expected and not on the bus -> why not."""
        return {name: each.why for name, each in self._absent.items() if each.policy == policy}

    def why(self, name: str) -> str:
        """Why this worker is not on the bus; empty if it is, or is not expected."""
        absent = self._absent.get(name)
        return "" if absent is None else absent.why

    def policies(self) -> set[str]:
        """Whose weights the workers serve that are expected and not on the bus."""
        return {each.policy for each in self._absent.values()}

    def absent(self) -> dict[str, str]:
        """Expected workers of all policies that are not connected, each with the reason."""
        return {name: each.why for name, each in self._absent.items()}


MemberState = Literal["joining", "live", "gone"]

MEMBER_LIFE: dict[MemberState, dict[str, MemberState]] = {
    # said hello; its first heartbeat tells what it runs and which weights it attests
    "joining": {"hello": "joining", "beat": "live", "goodbye": "gone", "expired": "gone"},
    "live": {"hello": "live", "beat": "live", "goodbye": "gone", "expired": "gone"},
    "gone": {},
}
"""state -> event -> state. A new epoch is a new record; `gone` leaves the table."""

SERVING = frozenset({"ready", "updating"})
"""Heartbeat states in which a worker takes new requests (an update swaps between two steps)."""


@enum.unique
class Reason(enum.StrEnum):
    """Why a worker gets no requests; the value is its word in `status`."""

    sentence: str

    def __new__(cls, word: str, sentence: str) -> Self:
        """A word for programs, and a sentence for people."""
        reason = str.__new__(cls, word)
        reason._value_ = word
        reason.sentence = sentence
        return reason

    JOINING = "joining", "It has said hello, and its first heartbeat has not come."
    GONE = "gone", "Its lease is over."
    NOT_READY = "not_ready", "Its own state is none in which it takes requests."
    BEHIND = "behind", "Its weights are older than the version that is committed."
    PAUSED = "paused", "It is to be paused until a client sends `resume`."
    INTENT_UNKNOWN = "intent_unknown", "The router has yet to learn whether it is to be paused."
    ADAPTERS = "adapters", "Adapters that the store keeps are being brought to it."
    TRIPPED = "tripped", "It failed too often; it is tried again after a while."
    CUT_OFF = "cut_off", "Something could not be sent to it; its next heartbeat clears that."
    SET_ASIDE = "set_aside", "It is kept for a request that must run alone."


SHOWN = {Reason.BEHIND: "stale", Reason.PAUSED: "paused", Reason.TRIPPED: "tripped"}
"""Reasons that show instead of the worker's own state, the first one first."""


NO_HEARTBEAT = Heartbeat(seq=-1, state="starting")
"""What is known of a member before its first one."""


@dataclass(slots=True, eq=False)
class MemberRecord:
    """One lease of one worker or store.

    It has slots: when there are 1,000 of them, each has left the processor's cache before the next
    message of its member comes, and a dictionary of attributes is more to fetch.
    """

    peer: Peer
    hello: Hello
    expires_at: float
    name: str = field(init=False)
    role: Role = field(init=False)
    policy: str = field(init=False)
    """Whose weights it serves; empty for a store."""
    boot: str = field(init=False)
    epoch: str = field(init=False)
    state: MemberState = "joining"
    blocked_by: set[Reason] = field(default_factory=lambda: {Reason.JOINING})
    """Why it gets no requests; empty if it does. `router.members.eligibility` writes it."""
    heartbeat: Heartbeat = NO_HEARTBEAT
    heartbeat_at: float = field(init=False)
    version: int = 0
    slots: int = field(init=False)
    """Requests that its engine runs side by side."""
    capacity: int = field(init=False)
    """Most requests at the worker: its slots and a small queue that hides the round trip."""
    requests: set[str] = field(default_factory=set[str])
    """rids sent or running here."""
    outstanding_cost: int = 0
    """Estimated tokens of those; what placement balances."""
    commands: set[str] = field(default_factory=set[str])
    """Member commands (sub-rids) sent and not ended."""
    outbox: dict[AttemptKey, str] = field(default_factory=dict[AttemptKey, str])
    """(rid, attempt) -> client: endings that wait there for their client, by its heartbeats."""
    kept: dict[AttemptKey, str] = field(default_factory=dict[AttemptKey, str])
    """(rid, attempt) -> group: those of `outbox` that are detached."""
    knows_outbox: bool = True
    """No heartbeat that told of it was missed."""
    backlog: dict[str, int] = field(default_factory=dict[str, int])
    """Client -> bytes of its endings here, for those who have much."""
    free_index: int = -1
    """Its place in a free list, that of `free_version` and `has_free_slot`; -1: in none."""
    free_version: int = 0
    has_free_slot: bool = False
    counted_version: int | None = None
    """The version that it is counted for among those that take requests; None: it does not."""
    session_fill: float | None = None
    """Sessions that it holds, by its slots, where it is filed as one with room; None: nowhere."""
    is_catching_up: bool = False
    fleet: str = field(init=False)
    """Whose weights it came with; empty: no fleet's, or those that an engine begins with."""
    is_foreign: bool = False
    """They are another fleet's, whose versions are not this one's."""
    adapters: dict[str, int] = field(init=False)
    """Name -> version: those that it has, as it said last."""
    refused_adapters: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """(name, version) of those that it could not load."""
    retry_adapters_at: float = 0.0
    retry_pause_at: float = 0.0
    retry_update_at: float = 0.0
    marks: set[int] = field(default_factory=set[int])
    """Of the beginnings of prompts that it has cached, or is expected to have soon."""
    marks_expected: dict[int, None] = field(default_factory=dict[int, None])
    """Those that it has not told of yet, the oldest first."""
    prefixes_seq: int = 0
    """Number of what it tells of them next."""
    n_keys_sent: int = 0
    """The allow-list was sent so often since the member had it, or was to have another one."""
    keys_again_at: float = 0.0
    """When it is sent next, if the member does not have it by then."""
    problem: str = ""
    """Why the last weight update failed here; empty when it did not."""

    def __post_init__(self) -> None:
        hello, facts = self.hello, self.hello.worker
        self.name, self.role, self.boot, self.epoch = (
            hello.name,
            hello.role,
            hello.boot,
            hello.epoch,
        )
        self.heartbeat_at = self.expires_at
        self.fleet = hello.intent.fleet if hello.intent else ""
        self.policy = facts.policy if facts else ""
        self.slots = slots = facts.slots if facts else 0
        self.capacity = slots + slots // 4 + 1 if slots else 0
        self.adapters = dict(facts.adapters) if facts else {}

    def advance(self, event: str) -> None:
        """Take a step of MEMBER_LIFE; LocalProtocolError if the event has no meaning now."""
        self.state = next_state(MEMBER_LIFE, self.state, event, f"member {self.name}")

    @property
    def has_whole_outbox(self) -> bool:
        """Whether an ending that is not in `outbox` does not wait here."""
        n_outbox = self.heartbeat.n_outbox
        return self.knows_outbox and n_outbox in (None, len(self.outbox))

    def note_outbox(self, heartbeat: Heartbeat, before: int) -> None:
        """Take the news of a heartbeat; `before` is the number of the one that was heard last."""
        if heartbeat.follows == 0:
            self.outbox, self.kept, self.knows_outbox = {}, {}, True
        elif heartbeat.follows != before:
            self.knows_outbox = False
        if not self.knows_outbox:
            return
        for rid, attempt in heartbeat.acked:
            key = (RequestId(rid), attempt)
            self.outbox.pop(key, None)
            self.kept.pop(key, None)
        groups = dict(heartbeat.detached) if heartbeat.detached else {}
        for rid, attempt, client in heartbeat.outbox:
            key = (RequestId(rid), attempt)
            self.outbox[key] = client
            if rid in groups:
                self.kept[key] = groups[rid]
        if (
            heartbeat.n_outbox is not None
            and len(heartbeat.outbox) + len(heartbeat.acked) < MAX_NEWS
        ):
            self.knows_outbox = heartbeat.n_outbox == len(self.outbox)
        self.backlog = {client: n_bytes for client, _, n_bytes in heartbeat.backlog}

    @property
    def is_laden(self) -> bool:
        """Whether so many endings wait here that their clients may have too many."""
        return bool(self.backlog) or len(self.outbox) >= SMALL_OUTBOX

    @property
    def is_fit(self) -> bool:
        """Whether it could serve, were it not set aside."""
        return self.blocked_by <= {Reason.SET_ASIDE}

    def public(self) -> Member:
        """The member's record as clients see it."""
        return Member(
            name=self.name,
            epoch=self.epoch,
            stream=self.hello.worker.stream if self.hello.worker else "",
            state=self.shown_state,
            version=self.version,
            policy=self.policy,
            gpus=self.hello.worker.gpus if self.hello.worker else [],
        )

    @property
    def shown_state(self) -> str:
        """One word for people: the worker's own state unless the router knows better."""
        if self.state == "joining":
            return "joining"
        if Reason.NOT_READY in self.blocked_by:
            return self.heartbeat.state
        words = (word for reason, word in SHOWN.items() if reason in self.blocked_by)
        return next(words, self.heartbeat.state)


class MemberTable:
    """All live members, by name and by connection; the few that a tick has to look at.

    A tick asks these tables 20 times a second: none of them looks at all members then.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, MemberRecord] = {}
        self._by_peer: dict[Peer, MemberRecord] = {}
        self._workers: dict[str, MemberRecord] = {}
        self._stores: dict[str, MemberRecord] = {}
        self._laden: dict[str, MemberRecord] = {}
        self._none_ends_before = math.inf
        """No lease ends earlier."""
        self.named: Callable[[str], MemberRecord | None] = self._by_name.get
        """The member with this name; the dict's own method, asked for each ending."""
        self.at: Callable[[Peer], MemberRecord | None] = self._by_peer.get

    def __iter__(self) -> Iterator[MemberRecord]:
        return iter(self._by_name.values())

    def workers(self, policy: str | None = None) -> list[MemberRecord]:
        """Workers, in the order they joined; of one policy if given."""
        workers = self._workers.values()
        if policy is None:
            return list(workers)
        return [worker for worker in workers if worker.policy == policy]

    def store(self) -> MemberRecord | None:
        """The weight store, if one is here."""
        return next(iter(self._stores.values()), None)

    def laden(self) -> list[MemberRecord]:
        """Members where many endings wait for their clients."""
        return list(self._laden.values())

    def add(self, record: MemberRecord) -> None:
        """Take a new lease into the table."""
        self._by_name[record.name] = record
        self._by_peer[record.peer] = record
        of_role = self._workers if record.role == "worker" else self._stores
        of_role[record.name] = record
        self._none_ends_before = min(self._none_ends_before, record.expires_at)

    def renew(self, record: MemberRecord, until: float) -> None:
        """The lease ends then."""
        record.expires_at = until
        self._none_ends_before = min(self._none_ends_before, until)

    def note_load(self, record: MemberRecord) -> None:
        """A heartbeat told of the endings that wait at the member."""
        if record.is_laden:
            self._laden[record.name] = record
        elif self._laden:
            self._laden.pop(record.name, None)

    def rebind(self, record: MemberRecord, peer: Peer) -> Peer:
        """The same lease on a fresh connection; returns the old one."""
        old = record.peer
        self._by_peer.pop(old, None)
        record.peer = peer
        self._by_peer[peer] = record
        return old

    def remove(self, record: MemberRecord) -> None:
        """The lease is over."""
        if self._by_name.get(record.name) is record:
            for table in (self._by_name, self._workers, self._stores, self._laden):
                table.pop(record.name, None)
        if self._by_peer.get(record.peer) is record:
            del self._by_peer[record.peer]

    def expired(self, now: float) -> list[MemberRecord]:
        """Members whose lease has run out."""
        if now < self._none_ends_before:
            return []
        members = self._by_name.values()
        self._none_ends_before = min((each.expires_at for each in members), default=math.inf)
        return [member for member in members if member.expires_at <= now]
