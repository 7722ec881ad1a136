"""Life of a weight version in the store: the table of its states, and the versions there are."""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from rolloutbus.bus.actor.effects import next_state
from rolloutbus.bus.weights.manifest import total_bytes
from rolloutbus.bus.wire.entry import AttemptKey, Peer
from rolloutbus.bus.wire.limits import MAX_TAGS
from rolloutbus.bus.wire.messages.membership import Intent
from rolloutbus.bus.wire.messages.weights import Offer, Tensor


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """A store process took over the ledger."""

    owner: str
    """In the names of all its segments; the store after it becomes the same owner."""


class Assigned(msgspec.Struct, frozen=True, tag="assigned"):
    """A version number was given out; the store never gives it again."""

    policy: str
    version: int


class Sealed(msgspec.Struct, frozen=True, tag="sealed"):
    """The bytes were verified and lie in this segment."""

    policy: str
    version: int
    segment: str
    tensors: list[Tensor]
    """With digests."""
    allow_zeros: bool = False
    """Tensors of zeros in it are not to be judged."""


class CommitRecord(msgspec.Struct, frozen=True, tag="committed"):
    """The router decided: this is the version that the policy is served with."""

    policy: str
    version: int
    before: int = 0
    """The version committed before it, while it is committed in waves."""
    floor: int = 0
    """Workers that serve meanwhile; 0: it is committed at once, or the waves are through."""
    is_adapter: bool = False
    """It is a version of an adapter that all workers are to have; version 0: none is."""
    tag: int | None = None
    """Its trainer's own label."""


class Tagged(msgspec.Struct, frozen=True, tag="tagged"):
    """A committed version has this label of its trainer; written when a ledger is shortened."""

    policy: str
    version: int
    tag: int


class Retired(msgspec.Struct, frozen=True, tag="retired"):
    """The bytes are gone."""

    policy: str
    version: int


class Intended(msgspec.Struct, frozen=True, tag="intended"):
    """The intended state of the fleet, as the router last reported: its identity and its pauses."""

    intent: Intent


Record = Opened | Assigned | Sealed | CommitRecord | Tagged | Retired | Intended


class MemberAsker(NamedTuple):
    """A command that came through the router."""

    key: AttemptKey


class BulkAsker(NamedTuple):
    """A request on the bulk socket."""

    peer: Peer
    rid: str


Asker = MemberAsker | BulkAsker
"""The sender of a command, which waits for the answer."""


VersionState = Literal[
    "reserving", "reserved", "verifying", "sealed", "committed", "withdrawn", "retired"
]
VersionEvent = Literal[
    "allocated",
    "seal",
    "verified",
    "mismatch",
    "restored",
    "commit",
    "give_up",
    "withdraw",
    "outdated",
]
VersionKey = tuple[str, int]
"""(policy, version)."""
DeltaKey = tuple[str, int, int]
"""(policy, version, base)."""

VERSION_LIFE: dict[VersionState, dict[VersionEvent, VersionState]] = {
    # its number is taken; a segment is being made for it, or it shares an older version's
    "reserving": {"allocated": "reserved", "restored": "sealed", "give_up": "retired"},
    # the trainer writes
    "reserved": {"seal": "verifying", "give_up": "retired"},
    # its bytes are being compared with the trainer's digests
    "verifying": {"verified": "sealed", "mismatch": "reserved"},
    # immutable; may be pulled
    "sealed": {"commit": "committed", "withdraw": "withdrawn", "outdated": "retired"},
    # what its policy is, or was, served with; may be pulled
    "committed": {"commit": "committed", "outdated": "retired"},
    # it will never be committed; its bytes are kept while somebody still reads them
    "withdrawn": {"outdated": "retired"},
    "retired": {},
}
"""state -> event -> state."""

PULLABLE: frozenset[VersionState] = frozenset({"sealed", "committed"})


@dataclass(slots=True)
class StoredVersion:
    """One version and where its bytes lie."""

    policy: str
    number: int
    tensors: list[Tensor]
    """Without digests until it is being verified."""
    state: VersionState = "reserving"
    segment: str = ""
    used_at: float = 0.0
    """When it was last reserved, written, said to be written, or refused a seal; seconds of the
    core's clock."""
    pulled_until: float = 0.0
    """A worker that asked for it may ask for more until then."""
    askers: list[Asker] = field(default_factory=list[Asker])
    """Senders that wait for the step under way: the reservation, or the seal."""
    settlers: list[Asker] = field(default_factory=list[Asker])
    """Senders of settle requests, which wait for the step under way."""
    offers: list[Offer] = field(default_factory=list[Offer])
    """Other ways to its bytes than the segment."""
    is_adapter: bool = False
    """Committed as an adapter's."""
    may_hold_zeros: bool = False
    """Its trainer said so, or it is made of a version that was committed."""
    told: dict[int, int] = field(default_factory=dict[int, int])
    """Digests of tensors that are said to be written and were not read yet, by their places."""
    found: dict[int, int] = field(default_factory=dict[int, int])
    """Digests of tensors that were found right before the seal, by their places."""
    is_read_early: bool = False
    """Some of its tensors are being read while others are written."""
    is_pushed: bool = False
    """Bytes came over the bulk socket, at any time: all is verified once they are all there."""
    n_readers: int = 0
    """Threads of ours that read its segment, or will."""

    @property
    def key(self) -> VersionKey:
        """(policy, version)."""
        return (self.policy, self.number)

    @property
    def size_bytes(self) -> int:
        """Of all tensors, with the gaps between them."""
        return total_bytes(self.tensors)

    @property
    def is_pullable(self) -> bool:
        """Whether its bytes are whole and will not change."""
        return self.state in PULLABLE

    @property
    def allows_zeros(self) -> bool:
        """Whether a tensor of zeros is no reason to refuse it: what was committed is trusted."""
        return self.may_hold_zeros or self.state == "committed"

    def sealed(self) -> Sealed:
        """What is written down of it."""
        return Sealed(*self.key, self.segment, self.tensors, self.may_hold_zeros)

    def is_in_use(self, now: float) -> bool:
        """Whether a reader still uses the bytes; the reader would not notice that they are gone."""
        return self.n_readers > 0 or self.pulled_until > now

    def on(self, event: VersionEvent) -> None:
        """Take the table's step.

        Raises:
            LocalProtocolError: the event has no meaning in this state, which stays.
        """
        subject = f"version {self.number} of {self.policy!r}"
        self.state = next_state(VERSION_LIFE, self.state, event, subject)

    def take_digests(self, digests: list[int]) -> None:
        """What the trainer says the bytes are."""
        self.tensors = [
            msgspec.structs.replace(tensor, digest=digest)
            for tensor, digest in zip(self.tensors, digests, strict=True)
        ]

    def to_verify(self) -> list[Tensor]:
        """Tensors whose bytes were not found to have the digests that they were sealed with."""
        return [
            tensor
            for number, tensor in enumerate(self.tensors)
            if self.found.get(number) != tensor.digest
        ]


HISTORY = 256
"""So many committed versions of a policy are remembered after their bytes are gone."""


class VersionTable:
    """All versions that have or will have bytes, numbers taken, and what is committed."""

    def __init__(self) -> None:
        self.by_key: dict[VersionKey, StoredVersion] = {}
        self.assigned: dict[str, int] = {}
        """Highest number taken, per policy."""
        self.committed: dict[str, int] = {}
        """Last committed version, per policy."""
        self.waves: dict[str, tuple[int, int]] = {}
        """Policies whose last commit is not at all workers yet -> (version before it, floor)."""
        self.adapters: dict[str, int] = {}
        """`<policy>.<adapter>` -> version that all workers are to have."""
        self.intent: Intent | None = None
        """What the fleet is to be, as a router reported last."""
        self.history: dict[str, list[int]] = {}
        """Versions of each policy that have been committed, the latest last; not of adapters."""
        self.tags: dict[str, list[tuple[int, int]]] = {}
        """Policy -> (version, its trainer's label) of the latest that bear one, both growing."""

    @property
    def held_bytes(self) -> int:
        """Of the segments that are there; versions of the same bytes share one."""
        sizes = {each.segment: each.size_bytes for each in self.by_key.values() if each.segment}
        return sum(sizes.values())

    def restore(self, records: Iterable[Record]) -> None:
        """Become what earlier processes wrote down."""
        for record in records:
            match record:
                case Assigned():
                    self.take_number(record.policy, record.version)
                case Sealed():
                    stored = StoredVersion(record.policy, record.version, record.tensors, "sealed")
                    stored.segment = record.segment
                    stored.may_hold_zeros = record.allow_zeros
                    self.by_key[stored.key] = stored
                case CommitRecord():
                    if record.is_adapter:
                        self.note_adapter(record)
                    else:
                        self.note_history(record.policy, record.version)
                        last = self.committed.get(record.policy, 0)
                        self.committed[record.policy] = max(record.version, last)
                        self.note_waves(record)
                        self.note_tag(record.policy, record.version, record.tag)
                    if (stored := self.by_key.get((record.policy, record.version))) is not None:
                        stored.on("commit")
                        stored.is_adapter = record.is_adapter
                case Tagged(policy, version, tag):
                    self.note_tag(policy, version, tag)
                case Retired():
                    self.by_key.pop((record.policy, record.version), None)
                case Intended(intent):
                    self.intent = intent
                case Opened():
                    pass

    def snapshot(self) -> list[Record]:
        """The shortest record from which `restore` makes this table again."""
        records: list[Record] = [Assigned(*each) for each in self.assigned.items()]
        for stored in self.pullable():
            records.append(stored.sealed())
            if stored.state == "committed":
                records.append(CommitRecord(*stored.key, is_adapter=stored.is_adapter))
        kept = {stored.key for stored in self.pullable()}
        for policy, versions in self.history.items():
            past = [each for each in versions if (policy, each) not in kept]
            records += [CommitRecord(policy, each) for each in past]
        for policy, version in self.committed.items():
            records.append(CommitRecord(policy, version, *self.waves.get(policy, (0, 0))))
        forgotten = {each.policy: 0 for each in self.pullable() if each.is_adapter}
        for policy, version in {**forgotten, **self.adapters}.items():
            records.append(CommitRecord(policy, version, is_adapter=True))
        for policy, tags in self.tags.items():
            records += [Tagged(policy, *each) for each in tags]
        if self.intent is not None:
            records.append(Intended(self.intent))
        return records

    def note_history(self, policy: str, version: int) -> None:
        """Adds a committed version to the history of its policy, which outlasts the bytes."""
        history = self.history.setdefault(policy, [])
        if version and version not in history:
            bisect.insort(history, version)  # a snapshot has the latest first
            del history[:-HISTORY]

    def was_committed(self, policy: str, version: int) -> bool | None:
        """Whether it ever was; None: it is too old to tell."""
        stored = self.by_key.get((policy, version))
        if stored is not None:
            return stored.state == "committed"
        history = self.history.get(policy, [])
        if version in history:
            return True
        is_forgotten = len(history) == HISTORY and version < min(history)
        # Of adapters no history is kept.
        return None if is_forgotten or (not history and "." in policy) else False

    def note_adapter(self, record: CommitRecord) -> None:
        """Which version of an adapter all workers are to have, if any."""
        if record.version:
            self.adapters[record.policy] = record.version
        else:
            self.adapters.pop(record.policy, None)

    def note_tag(self, policy: str, version: int, tag: int | None) -> None:
        """It is committed under this label of its trainer, if it bears any."""
        if tag is not None:
            tags = {**dict(self.tags.get(policy, [])), version: tag}
            self.tags[policy] = sorted(tags.items())[-MAX_TAGS:]

    def note_waves(self, record: CommitRecord) -> None:
        """Records whether the last commit of a policy continues in waves."""
        if record.floor:
            self.waves[record.policy] = (record.before, record.floor)
        else:
            self.waves.pop(record.policy, None)

    def pullable(self) -> list[StoredVersion]:
        """Versions with complete, final bytes."""
        return [each for each in self.by_key.values() if each.is_pullable]

    def take_number(self, policy: str, number: int) -> None:
        """Reserves the number, so that this store gives it to no version."""
        self.assigned[policy] = max(number, self.assigned.get(policy, 0))

    def assign(self, policy: str, tensors: list[Tensor], number: int) -> StoredVersion:
        """A new version with this number, which is above all before."""
        self.assigned[policy] = number
        stored = StoredVersion(policy, number, tensors)
        self.by_key[stored.key] = stored
        return stored

    def uses(self, segment: str) -> bool:
        """Whether a version lies in this segment: a restored one shares that of an older one."""
        return any(each.segment == segment for each in self.by_key.values())

    def outdated(
        self, policy: str, *, keep_committed: int, keep_sealed: int
    ) -> list[StoredVersion]:
        """What need not be kept: all but the newest committed ones, and the newest after those."""
        last = self.committed.get(policy, 0)
        mine = sorted(
            (each for each in self.pullable() if each.policy == policy),
            key=lambda each: each.number,
        )
        committed = [each for each in mine if each.state == "committed"]
        ahead = [each for each in mine if each.state == "sealed" and each.number > last]
        kept = {each.key for each in committed[-keep_committed:] + ahead[-keep_sealed:]}
        return [each for each in mine if each.key not in kept]
