"""The member core: how a worker or store joins the bus, keeps its lease and delivers endings.

Pure: time comes with every call, chance with the constructor. The actor around it applies the
effects; what the commands mean is left to the core that uses this one.
Spec: docs/protocol.md, "Membership" and "Delivery".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Literal

import msgspec
from msgspec import Raw

from rolloutbus.bus.actor.effects import THE_LINK, Connect, Send, Stop, next_state
from rolloutbus.bus.backoff import Backoff, Chance
from rolloutbus.bus.membership.deliveries import (
    Deliveries,
    Execute,
    Heed,
    LetIn,
    MemberEffect,
    StopSilently,
    StopWork,
)
from rolloutbus.bus.membership.lease import (
    HOLDING,
    LINKED,
    MEMBER_LINK,
    UNLINKED_TRYING,
    LeaseHolder,
    LinkEvent,
    LinkState,
)
from rolloutbus.bus.membership.outbox import MAX_BYTES
from rolloutbus.bus.membership.tombstones import CrashWitness
from rolloutbus.bus.security.principals import principals_in
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.codec import SPOKEN, pack, unpack
from rolloutbus.bus.wire.commands import COMMANDS, ENDINGS, KINDS
from rolloutbus.bus.wire.durations import Durations
from rolloutbus.bus.wire.entry import AttemptKey, Entry, Epoch
from rolloutbus.bus.wire.errors import RemoteProtocolError, SettingsError
from rolloutbus.bus.wire.messages.endings import Accepted, Ack, Fenced, Problem
from rolloutbus.bus.wire.messages.membership import (
    EXPLAINED,
    Dismissed,
    Goodbye,
    HandedKeys,
    Heartbeat,
    Hello,
    Intent,
    Lease,
    Rejected,
    StoreFacts,
    Welcome,
    WorkerFacts,
)

HELLO_AGAIN_S = 0.25
"""Several `unknown-peer` for one burst of ours are answered with one hello."""


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """Identity of this process for as long as it lives."""

    role: Literal["worker", "store"]
    name: str
    boot: str
    """Random 128-bit hex."""


NOTHING_COUNTED: Mapping[str, int] = MappingProxyType({})
NOTHING_MEASURED: Mapping[str, Durations] = MappingProxyType({})
NO_GAUGES: Mapping[str, float] = MappingProxyType({})


class Vitals(msgspec.Struct, frozen=True, gc=False):
    """State of an engine for a `Heartbeat`, without its executions."""

    version: int = 0
    state: str = "ready"
    steps: int = 0
    free: int = 0
    n_tokens: int = 0
    stalled_ms: float = 0.0
    counters: Mapping[str, int] = NOTHING_COUNTED
    durations: Mapping[str, Durations] = NOTHING_MEASURED
    gauges: Mapping[str, float] = NO_GAUGES


@dataclass(slots=True)
class MemberCounters:
    """Things that should be rare."""

    fenced: int = 0
    """Commands dropped: not under the present lease."""
    malformed: int = 0
    """Entries dropped: they broke the protocol."""
    leases_lost: int = 0
    links_lost: int = 0
    old_routers: int = 0
    """Answers ignored: they came from a router that was replaced."""


class MemberCore:
    """Membership and delivery of one member."""

    def __init__(
        self,
        identity: MemberIdentity,
        settings: LeaseSettings,
        chance: Chance,
        vitals: Callable[[], Vitals] = Vitals,
        outbox_limit_bytes: int = MAX_BYTES,
        intent: Intent | None = None,
    ) -> None:
        """`intent`: the one that an earlier process recorded, if any."""
        self.identity = identity
        self.counters = MemberCounters()
        self.deliveries = Deliveries(settings, outbox_limit_bytes)
        self.crashes = CrashWitness()
        self._settings = settings
        self._vitals = vitals
        self._holder = LeaseHolder(identity.boot, settings.holder_s)
        self._backoff = Backoff(settings.reconnect_first_s, settings.reconnect_max_s, chance)
        self._facts: WorkerFacts | StoreFacts | None = None
        self._state: LinkState = "away"
        self._intent = intent
        """What the router wants of the fleet, as it told last."""
        self._named_by = ""
        """Instance of the router that told the fleet's identity; empty: none of this process's."""
        self.is_at_standby = False
        """The link leads to a router that stands by for another one."""
        self._has_rejected = False
        """The link leads to a second router: nothing that comes over it counts."""
        self.greeted_at = 0.0
        """When it said hello last: since then the router may know nothing but that."""
        self._heard_at = 0.0
        self._ticked_at = 0.0
        self._heartbeat_at = 0.0
        self._reported_seq = 0
        """The heartbeat before: what its news were continued from."""
        self._retry_at = 0.0
        self._keys_stamp = ""
        """Of the allow-list that was handed over the present link."""

    @property
    def state(self) -> LinkState:
        """Its state in `bus.membership.lease.MEMBER_LINK`."""
        return self._state

    @property
    def epoch(self) -> Epoch:
        """Name of the present lease, held or asked for."""
        return self._holder.epoch

    def online(self, facts: WorkerFacts | StoreFacts, now: float) -> list[MemberEffect]:
        """There is something to offer: join under a new epoch."""
        self._facts = facts
        self._ticked_at = now
        return self._connect("online", now)

    def offline(self, reason: str, now: float) -> list[MemberEffect]:
        """Nothing to offer any more: leave, keep the outbox, wait for `online`."""
        effects = self._farewell(reason)
        self._move("offline")
        self.deliveries.stop_all(now)
        return effects

    def leave(self, reason: str) -> list[MemberEffect]:
        """Leave for good."""
        effects = self._farewell(reason)
        self._move("stopped")
        return [*effects, Stop(reason)]

    def link_down(self, now: float) -> list[MemberEffect]:
        """The connection is gone."""
        effects = self._judge_lease(now)
        if self._state in LINKED:
            self._lose_link(now)
        return effects

    def receive(self, entries: Iterable[Entry], now: float) -> list[MemberEffect]:
        """Take entries of the router."""
        effects = self._judge_lease(now)
        is_obedient = self._state in HOLDING
        for entry in entries:
            if self._has_rejected:
                self.counters.old_routers += 1
                continue
            if entry.kind in COMMANDS:
                if is_obedient and entry.epoch == self._holder.epoch:
                    effects += self._take(entry, now)
                else:
                    self.counters.fenced += 1
                continue
            try:
                effects += self._control(entry, now)
            except RemoteProtocolError:
                self.counters.malformed += 1
            is_obedient = self._state in HOLDING
        return effects

    def ended(
        self, kind: str, key: AttemptKey, body: msgspec.Struct | Raw, now: float
    ) -> list[MemberEffect]:
        """An execution ended; nothing happens if it was taken away meanwhile."""
        effects = self._judge_lease(now)
        packed = body if isinstance(body, Raw) else pack(body)
        entry = self.deliveries.end(kind, key, packed, now)
        return effects if entry is None else [*effects, *self._deliver(entry, now)]

    def give_up(self, keys: Iterable[AttemptKey], now: float) -> list[Send]:
        """These executions will not be carried out here: heartbeats no longer name them."""
        self.deliveries.fence(list(keys), now)
        return self.heartbeat(now)

    def flush(self, now: float) -> list[Send]:
        """The end of a loop tick: report in one message all executions that began in it."""
        if not self.deliveries.begun or not self._may_send(now):
            return []
        return [self._send("accepted", Accepted(items=self.deliveries.take_begun()))]

    def heartbeat(self, now: float) -> list[Send]:
        """Heartbeat at once: something that the router dispatches by has changed."""
        return [self._heartbeat(now)] if self._state in LINKED else []

    def tick(self, now: float) -> list[MemberEffect]:
        """Time passes; to be called a few times per heartbeat."""
        settings = self._settings
        if now - self._ticked_at > settings.late_tick_s:
            # We were frozen: the answers may lie unread in the socket.
            self._heard_at = max(self._heard_at, now - settings.silence_s + settings.heartbeat_s)
        self._ticked_at = now
        effects = self._judge_lease(now)
        if self._state in LINKED:
            if now - self._heard_at > settings.silence_s:
                self._lose_link(now)
            elif now >= self._heartbeat_at:
                effects.append(self._heartbeat(now))
        if self._state in UNLINKED_TRYING and now >= self._retry_at:
            effects += self._connect("connected", now)
        if self.deliveries.outbox.size_bytes and self._may_send(now):
            for entry in self.deliveries.outbox.due(self._holder.epoch, now):
                effects.append(Send(THE_LINK, entry))
        self.deliveries.tombstones.expire(now)
        return effects

    def _take(self, entry: Entry, now: float) -> list[MemberEffect]:
        if not entry.rid:
            return [Execute(entry)] if entry.kind == "abort" else []
        taken = self.deliveries.take(entry, now)
        if taken.execute is not None:
            return [taken.execute] if taken.forget is None else [taken.forget, taken.execute]
        return [] if taken.ending is None else self._deliver(taken.ending, now)

    def _control(self, entry: Entry, now: float) -> Sequence[MemberEffect]:
        if entry.kind not in KINDS:
            return [] if entry.kind in ENDINGS else self._unknown(entry, now)
        match unpack(entry):
            case Lease() as lease:
                self._answered(lease, now)
            case Welcome() as welcome:
                return self._welcomed(welcome, now)
            case Ack(items, settled):
                self.deliveries.acknowledge(items, settled, now)
            case Fenced(items):
                stopped = self.deliveries.fence(items, now)
                return [StopSilently(stopped)] if stopped else []
            case Intent() as intent:
                return self._heed(intent)
            case HandedKeys() as keys:
                return self._let_in(keys, entry)
            case Dismissed(code, message):
                return self._dismissed(code, message, now)
            case _:
                pass
        return []

    def _welcomed(self, welcome: Welcome, now: float) -> list[MemberEffect]:
        epoch, instance, holder = welcome.router_epoch, welcome.instance, self._holder
        is_second = holder.rejects(epoch, instance, welcome.up_ms / 1000, now)
        if self._state not in LINKED or not is_second:
            holder.bind(epoch, instance)
            return []
        self.counters.old_routers += 1
        self._has_rejected = True
        self._lose_link(now)
        return [self._send("rejected", Rejected(holder.router_epoch, holder.instance))]

    def _heed(self, intent: Intent) -> list[MemberEffect]:
        known, self._intent = self._intent, intent
        if intent == known:
            return []
        former = known.fleet if known is not None and known.fleet != intent.fleet else ""
        is_renamed = self._named_by == self._holder.instance  # it has learnt of an older name
        self._named_by = self._holder.instance
        return [Heed(intent, "" if is_renamed else former)]

    def _let_in(self, keys: HandedKeys, entry: Entry) -> list[MemberEffect]:
        if self._state not in LINKED:
            return []
        try:
            principals = principals_in(keys)
        except SettingsError as error:
            raise RemoteProtocolError(str(error)) from error
        self._keys_stamp = keys.stamp
        return [LetIn(principals, entry.body)]

    def _unknown(self, entry: Entry, now: float) -> list[MemberEffect]:
        self.counters.malformed += 1
        if not entry.rid or entry.epoch != self._holder.epoch:
            return []
        refusal = self.deliveries.refuse(entry, "refused", pack(_unknown_kind(entry.kind)), now)
        return self._deliver(refusal, now)

    def _answered(self, lease: Lease, now: float) -> None:
        holder = self._holder
        if not holder.bind(lease.router_epoch, lease.instance):
            self.counters.old_routers += 1
            return
        if self._state not in LINKED or not holder.renew(lease.seq):
            return
        if lease.is_behind:
            self.deliveries.outbox.report_all()
        self._heard_at = now
        if self._state != "leased" and holder.is_held(now):
            self._backoff.reset()
            # The router may have been replaced: whatever it has not forwarded is sent again.
            self.deliveries.outbox.due_now(None, now)
            self._move("leased")

    def _dismissed(self, code: str, message: str, now: float) -> list[MemberEffect]:
        if self._state not in LINKED:
            return []
        if code == "unknown-peer":
            if now - self.greeted_at < HELLO_AGAIN_S:
                return []
            self._move("unknown")
            return self._greet(now)
        if code == "shutting-down":
            self._lose_link(now)
            return []
        if code == "standby":
            self.is_at_standby = True
            if self._state == "leased":  # it is our own router that says so
                self._holder.released()
            self._lose_link(now)
            return []
        self._move("stopped")
        self.deliveries.stop_all(now)
        return [StopWork(code), Stop(f"{code}: {message}" if code in EXPLAINED else code)]

    def _judge_lease(self, now: float) -> list[MemberEffect]:
        if self._state not in HOLDING or self._holder.is_held(now):
            return []
        self.counters.leases_lost += 1
        self._move("lease_expired")
        self._retry_at = now + self._backoff.next_s()
        self._holder.renounce()
        self.deliveries.stop_all(now, but_detached=True)
        return [StopWork("lease_expired")]

    def _lose_link(self, now: float) -> None:
        self.counters.links_lost += 1
        self._move("link_lost")
        self._retry_at = now + self._backoff.next_s()

    def _connect(self, event: LinkEvent, now: float) -> list[MemberEffect]:
        self._move(event)
        self._has_rejected = self.is_at_standby = False
        self._keys_stamp = ""
        return [Connect(self.counters.links_lost), *self._greet(now)]

    def _greet(self, now: float) -> list[MemberEffect]:
        self.greeted_at = self._heard_at = now
        if self._state not in HOLDING:
            # The router may have taken an earlier hello, and given that lease up since.
            self._holder.renounce()
        hello = _hello(self.identity, self._facts, self._holder, self._intent)
        return [self._send("hello", hello), self._heartbeat(now, is_first=True)]

    def _heartbeat(self, now: float, *, is_first: bool = False) -> Send:
        """`is_first`: the router may know nothing of earlier heartbeats."""
        self._heartbeat_at = now + self._settings.heartbeat_s
        if is_first:
            self.deliveries.outbox.report_all()
        seq = self._holder.next_heartbeat(now)
        stamp = (0, 0) if self._intent is None else self._intent.stamp
        vitals = self._vitals()
        counters = {**asdict(self.counters), **vitals.counters}
        seqs = (seq, self._reported_seq)
        heartbeat = _heartbeat_of(
            seqs, vitals, counters, self.deliveries, (stamp, self._keys_stamp)
        )
        self._reported_seq = seq
        if is_first:
            heartbeat = msgspec.structs.replace(
                heartbeat, over=list(self.deliveries.settled), suspects=self.crashes.listed(now)
            )
        return self._send("beat", heartbeat)

    def _farewell(self, reason: str) -> list[MemberEffect]:
        return [self._send("goodbye", Goodbye(reason))] if self._state in LINKED else []

    def _deliver(self, ending: Entry, now: float) -> list[MemberEffect]:
        # Without a lease it waits in the outbox, which is sent when the next one begins.
        return [Send(THE_LINK, ending)] if self._may_send(now) else []

    def _may_send(self, now: float) -> bool:
        return self._state in LINKED and self._holder.is_held(now)

    def _send(self, kind: str, body: msgspec.Struct) -> Send:
        return Send(THE_LINK, Entry(kind, epoch=self._holder.epoch, body=pack(body)))

    def _move(self, event: LinkEvent) -> None:
        self._state = next_state(MEMBER_LINK, self._state, event, "this member")


def _hello(
    who: MemberIdentity,
    facts: WorkerFacts | StoreFacts | None,
    holder: LeaseHolder,
    intent: Intent | None,
) -> Hello:
    return Hello(
        role=who.role,
        name=who.name,
        boot=who.boot,
        epoch=holder.epoch,
        router_epoch=holder.router_epoch,
        router_instance=holder.instance,
        protocol=SPOKEN,
        worker=facts if isinstance(facts, WorkerFacts) else None,
        store=facts if isinstance(facts, StoreFacts) else None,
        intent=intent,
    )


def _unknown_kind(kind: str) -> Problem:
    sentence = f"This worker does not know {kind[:32]!r}; is it older than its client?"
    return Problem("unknown_message", sentence, "not_started")


def _heartbeat_of(
    seqs: tuple[int, int],
    vitals: Vitals,
    counters: dict[str, int],
    deliveries: Deliveries,
    stamps: tuple[tuple[int, int], str],
) -> Heartbeat:
    """`seqs`: its own number, and that of the heartbeat before; `stamps`: of intent and keys."""
    (seq, last_seq), news = seqs, deliveries.outbox.take_news()
    intent, keys = stamps
    return Heartbeat(
        seq=seq,
        version=vitals.version,
        state=vitals.state,
        steps=vitals.steps,
        free=vitals.free,
        running=deliveries.running_list(),
        outbox=news.came,
        n_tokens=vitals.n_tokens,
        stalled_ms=vitals.stalled_ms,
        detached=deliveries.detached_list(news.came),
        follows=0 if news.is_whole else last_seq,
        acked=news.went,
        n_outbox=len(deliveries.outbox),
        backlog=deliveries.outbox.backlog(),
        intent=intent,
        counters=counters,
        durations=dict(vitals.durations),
        gauges=dict(vitals.gauges),
        keys=keys,
    )
