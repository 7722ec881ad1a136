"""What the parts of the router core share: tables, identity, and the way out."""

from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Raw

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import NO_BODY, Attempt, Entry
from rolloutbus.bus.wire.limits import MAX_POLICIES, MAX_TAGS
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.membership import Intent, StoreFacts
from rolloutbus.bus.wire.versions import VersionRule
from rolloutbus.router.events import Outgoing
from rolloutbus.router.members.clients import Clients
from rolloutbus.router.members.eligibility import Eligibility
from rolloutbus.router.members.records import ExpectedWorkers, MemberRecord, MemberTable, Reason
from rolloutbus.router.requests.detached import Detached
from rolloutbus.router.settings import RouterSettings


class Waves(NamedTuple):
    """A commit that goes on in waves, as the store recorded it."""

    version: int
    floor: int
    """So many workers serve meanwhile, some of them with older weights."""


@dataclass(slots=True)
class Context:
    """Shared state of one router core."""

    settings: RouterSettings
    instance: str
    members: MemberTable = field(default_factory=MemberTable)
    clients: Clients = field(default_factory=Clients)
    eligibility: Eligibility = field(default_factory=Eligibility)
    out: Outgoing = field(default_factory=Outgoing)
    detached: Detached = field(init=False)
    expected: ExpectedWorkers = field(init=False)
    router_epoch: int = 1
    is_recovering: bool = True
    tap: str = ""
    """Where the router publishes what it routes; empty: nowhere."""
    is_traced: bool = False
    """The router tells of each request where traces are collected."""
    started_at: float | None = None
    """Of the first tick, seconds; None before it."""
    superseded: str = ""
    """Who told that another router holds the fleet; this one must exit. Else empty."""
    intent: Intent = field(default_factory=Intent)
    """What the fleet is to be: its identity, and who is to be paused."""
    knows_intent: bool = False
    """Whether those who could tell what an earlier router was asked for have done so."""
    committed: dict[str, int] = field(default_factory=dict[str, int])
    """Last committed version per policy; `note_commit` writes it."""
    tags: dict[str, list[tuple[int, int]]] = field(default_factory=dict[str, list[tuple[int, int]]])
    """Policy -> (version, label) of the latest that bear a label of their trainer, both growing;
    `note_tag` writes it."""
    recorded: dict[str, int] = field(default_factory=dict[str, int])
    """Policy, or `<policy>.<adapter>` -> last version in the record of the store that came last."""
    in_waves: dict[str, Waves] = field(default_factory=dict[str, Waves])
    """Policies with a commit that an earlier router, or this one, has not brought to all yet;
    theirs in `committed` is the version before it."""
    adapters: dict[str, int] = field(default_factory=dict[str, int])
    """`<policy>.<adapter>` -> version in the store that all its workers are to have."""
    may_lack: dict[str, MemberRecord] = field(default_factory=dict[str, MemberRecord])
    """Workers that have just joined or changed their adapters, by name: they may lack some."""
    delta_shares: dict[str, float] = field(default_factory=dict[str, float])
    """Policy -> bytes that its last delta moved, by those of the version."""
    counters: dict[str, int] = field(default_factory=dict[str, int])
    troubled: dict[str, str] = field(default_factory=dict[str, str])
    """Workers whose breaker is not closed, gone ones too -> what failed last."""
    has_member_news: bool = False
    """Clients are to be told of the members again."""
    wants_marks: bool = False
    """Workers tell of their caches: clients are to say how their prompts begin."""
    _n_attempts: int = 0
    _n_names: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self.router_epoch = self.settings.epoch
        silence_s = self.settings.leases.silence_s
        self.expected = ExpectedWorkers(
            self.settings.expected_workers, self.settings.leases.lease_s
        )
        self.detached = Detached(self.clients, silence_s)

    def next_attempt(self) -> Attempt:
        """A number no attempt had before."""
        self._n_attempts += 1
        return (self.router_epoch, self._n_attempts)

    def next_name(self, what: str) -> str:
        """An id for a command of the router's own; no router gave it to another one before."""
        self._n_names[what] = n = self._n_names.get(what, 0) + 1
        return f"{what}-{self.instance[:8]}-{n}"

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + by

    def committed_of(self, policy: str) -> int:
        """Last committed version of a policy; 0 before the first."""
        return self.committed.get(policy, 0)

    def known_policies(self) -> set[str]:
        """Those with a worker that is here or expected, or with a committed version."""
        served = {worker.policy for worker in self.members.workers()}
        return served | self.expected.policies() | self.committed.keys()

    @property
    def may_miss_commits(self) -> bool:
        """Whether this router may not know yet what was committed before it began."""
        return self.is_recovering and self.members.store() is None

    def note_commit(self, policy: str, version: int) -> None:
        """This version is committed; policies beyond what a status can list are ignored."""
        committed = self.committed
        if policy in committed or len(committed) < MAX_POLICIES:
            committed[policy] = max(version, committed.get(policy, 0))
        for worker in self.members.workers(policy):
            self.note_version(worker, worker.version)

    def note_tag(self, policy: str, version: int, tag: int | None) -> None:
        """The version is committed under this label of its trainer, if it bears any."""
        if tag is not None and (policy in self.tags or len(self.tags) < MAX_POLICIES):
            tags = {**dict(self.tags.get(policy, [])), version: tag}
            self.tags[policy] = sorted(tags.items())[-MAX_TAGS:]

    def numbered(self, policy: str, rule: VersionRule) -> VersionRule:
        """A rule that names a label as one that names a version, as soon as one bears the label.

        Labels grow with the numbers, so the first version that does stays the first.
        """
        if rule.kind != "min-tag":
            return rule
        versions = (version for version, tag in self.tags.get(policy, ()) if tag >= rule.value)
        version = next(versions, None)
        return rule if version is None else VersionRule("min", version)

    def note_version(self, worker: MemberRecord, version: int) -> None:
        """The worker has these weights active."""
        worker.version = version
        is_behind = version < self.committed_of(worker.policy)
        self.eligibility.note(worker, Reason.BEHIND, is_blocking=is_behind)

    def may_serve(self, worker: MemberRecord, rule: VersionRule | None) -> bool:
        """Whether the worker's weights are what the rule asks for."""
        return rule is None or rule.accepts(worker.version, self.committed_of(worker.policy))

    def quarantine_of(self, worker: MemberRecord) -> str:
        """Why it gets no requests until it has caught up; empty if it is not behind."""
        if worker.state != "live" or Reason.BEHIND not in worker.blocked_by:
            return ""
        committed = self.committed_of(worker.policy)
        return worker.problem or f"it has version {worker.version}; {committed} is committed"

    def to_client(self, client: str, entry: Entry) -> None:
        """Send to a client by name; the entry is dropped if the client is away."""
        record = self.clients.named(client)
        if record is not None:
            self.out.send(record.peer, entry)

    def to_member(self, member: MemberRecord, kind: str, body: Raw) -> None:
        """Send a message outside of any command to a member."""
        self.out.send(member.peer, Entry(kind, epoch=member.epoch, body=body))

    def finish(self, client: str, rid: str, body: Raw = NO_BODY) -> None:
        """Answer a client's command with `finished`."""
        self.to_client(client, Entry("finished", rid, body=body))

    def refuse(self, client: str, rid: str, problem: Problem, kind: str = "refused") -> None:
        """Answer a client's command with `refused`, `expired` or `failed`."""
        request = self.detached.requests.get(rid)
        if request is not None and request.client == client:
            self.detached.keep_unheard(request, kind, problem)
            if not self.detached.is_followed(request):
                return
        self.to_client(client, Entry(kind, rid, body=pack(problem)))


def refusal(code: str, message: str, field_name: str = "", retry_after_ms: int = 0) -> Problem:
    """Why nothing was started."""
    return Problem(code, message, "not_started", field_name, retry_after_ms)


def check_deadline(entry: Entry) -> Problem | None:
    """Every command has a deadline."""
    if entry.deadline_ms > 0:
        return None
    return refusal("bad_request", "a command needs a deadline of at least 1 ms", "deadline_ms")


def store_facts(context: Context) -> StoreFacts | None:
    """What the store that is connected offers."""
    store = context.members.store()
    return None if store is None else store.hello.store


def why_no_store(context: Context, now: float) -> str:
    """Why workers wait for the store in vain; empty: it is connected and talks."""
    store = context.members.store()
    if store is None:
        return "no weight store is connected; start one with `rolloutbus store` and publish again"
    silent_s = now - store.heartbeat_at
    silence_s = context.settings.leases.silence_s
    return f"it has said nothing for {silent_s:.1f} s" if silent_s > silence_s else ""


def note_record(context: Context, facts: StoreFacts) -> None:
    """A store tells what it has written down."""
    context.in_waves.clear()
    context.recorded = {**facts.committed, **facts.adapters}
    context.adapters.update(facts.adapters)
    for policy, tags in facts.tags.items():
        for version, tag in tags:
            context.note_tag(policy, version, tag)
    for policy, version in facts.committed.items():
        before, floor = facts.waves.get(policy, (version, 0))
        if floor:
            context.in_waves[policy] = Waves(version, floor)
            if context.is_recovering and context.committed_of(policy) == version:
                context.committed.pop(policy, None)  # what is noted is what a worker attests
        context.note_commit(policy, before)


def lacking(context: Context, worker: MemberRecord) -> list[tuple[str, int]]:
    """Adapters of the store, (name, version), that it could have and has not."""
    facts = worker.hello.worker
    if not context.adapters or facts is None or "load_lora" not in facts.capabilities:
        return []
    named = ((*key.rpartition("."), version) for key, version in context.adapters.items())
    return [
        (name, version)
        for policy, _, name, version in named
        if policy == worker.policy and worker.adapters.get(name) != version
    ]


def highest_taken(context: Context, policy: str) -> int:
    """The highest number that a version is known to have, whichever store gave it; 0: none has one.

    `policy` may be `<policy>.<adapter>`.
    """
    waves = context.in_waves.get(policy)
    base, _, adapter = policy.rpartition(".")
    return max(
        context.committed_of(policy),
        context.adapters.get(policy, 0),
        0 if waves is None else waves.version,
        *(worker.version for worker in context.members.workers(policy)),
        *(worker.adapters.get(adapter, 0) for worker in context.members.workers(base)),
    )


def is_recorded(context: Context, policy: str, version: int) -> bool:
    """Whether this is the version that was decided for last."""
    waves = context.in_waves.get(policy)
    return version == (context.committed_of(policy) if waves is None else waves.version)
