"""The weight store's shell: sockets, threads, files and time around its pure cores."""

import asyncio
import random
import secrets
from collections.abc import Callable

import msgspec

from rolloutbus.bus.actor.effects import Connect, Send, Stop
from rolloutbus.bus.actor.loop import Actor, Clock, one_by_one
from rolloutbus.bus.actor.process import warn
from rolloutbus.bus.membership.core import MemberCore, MemberIdentity, Vitals
from rolloutbus.bus.membership.deliveries import Execute, Heed, LetIn, MemberEffect
from rolloutbus.bus.security.principals import BULK_KINDS_OF, Principal
from rolloutbus.bus.security.zmq_curve import dialer_of
from rolloutbus.bus.security.zmq_guard import Doorway, guard_of
from rolloutbus.bus.transport.endpoints import advertised, router_addresses
from rolloutbus.bus.transport.interfaces import facing
from rolloutbus.bus.transport.ports import LAST_WORDS_MS, Patience
from rolloutbus.bus.transport.zmq_ports import DealerPort, RouterPort
from rolloutbus.bus.weights.shm import host_id
from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import AttemptKey, Entry, Peer, RequestId
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.limits import MAX_BULK_IN_BYTES
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.membership import StoreFacts
from rolloutbus.bus.wire.messages.weights import PullChunk, PullDelta, PullManifest, PushChunk
from rolloutbus.trainer_adapter.store.contents import StoreContents
from rolloutbus.trainer_adapter.store.core import MemberCommand, StoreCore
from rolloutbus.trainer_adapter.store.effect_runner import EffectRunner
from rolloutbus.trainer_adapter.store.ledger import LedgerUnsure
from rolloutbus.trainer_adapter.store.settings import StoreSettings
from rolloutbus.trainer_adapter.store.versions import Asker, BulkAsker, MemberAsker

TICK_S = 0.1
UPKEEP_S = 1.0
"""Between two looks at pins, lapsed reservations and silent pullers."""
BULK_SILENCE_S = 60.0
"""A bulk peer that said nothing for so long is forgotten; if it lives, it is learnt again."""


class StoreActor:
    """One weight store process."""

    def __init__(
        self,
        settings: StoreSettings,
        contents: StoreContents,
        clock: Clock,
        on_joined: Callable[[str], None] | None = None,
    ) -> None:
        if not settings.bulk:
            settings = msgspec.structs.replace(settings, bulk=facing(settings.router))
        self._settings = settings
        self._on_joined = on_joined
        """Called once, with the bulk endpoint, when the router has given the first lease."""
        self._clock = clock
        self._table = contents.table
        self._core = StoreCore(settings, host_id(), contents.table)
        identity = MemberIdentity("store", settings.name, secrets.token_hex(16))
        self._vitals = Vitals()
        self._member = MemberCore(
            identity,
            settings.lease,
            random.SystemRandom(),
            lambda: self._vitals,
            intent=contents.table.intent,
        )
        self._link: DealerPort | None = None
        self._routers = router_addresses(settings.router)
        self._router_at = self._routers[0]
        """Where `_link` leads."""
        self._patience = Patience(self._routers, "a store")
        self._dialer = dialer_of(settings.security)
        self._guard = guard_of(settings.security, is_member=True)
        self._actor = Actor(
            one_by_one(self._carry_out),
            clock=clock,
            tick=self._tick,
            tick_s=TICK_S,
            flush=self._member.flush,
        )
        self._upkeep_at = 0.0
        self._bulk_peers: dict[Peer, float] = {}
        self._effects = EffectRunner(self._core, contents, clock, self._answer)

    @property
    def _endpoint(self) -> str:
        """Of the bulk socket, as peers are told it."""
        return advertised(self._bulk.endpoints[0], self._settings.advertise)

    def stop(self) -> None:
        """Leave the bus and give all shared memory back."""
        self._actor.feed(self._leave)

    async def run(self) -> str:
        """Serve until `stop`, or until the router says that another store took this name.

        Returns:
            Why it left: `shutdown`, `replaced`, or another code of a dismissal.

        Raises:
            SecurityError: the lock on its socket does not work (any more).
            LedgerUnsure: its ledger cannot be written; the next store reads what is there.
        """
        guard = self._guard
        doorways = [] if guard is None else [Doorway(guard, "bulk", self._bulk_signed)]
        self._bulk = RouterPort(
            [self._settings.bulk],
            self._bulk_arrived,
            doorways=doorways,
            max_body_bytes=MAX_BULK_IN_BYTES,
        )
        if guard is None:
            return await self._run()
        try:
            await guard.prove()
            return await guard.while_proven(self._run())
        finally:
            self._bulk.close()
            guard.close()

    async def _run(self) -> str:
        facts = StoreFacts(
            self._endpoint,
            self._table.committed,
            host_id(),
            bool(self._settings.disk),
            self._table.waves,
            self._table.adapters,
            self._table.tags,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                self._effects.start(tasks)
                self._effects.run(self._core.opened())
                # The dicts are the table's own: every later hello says what they hold then.
                self._actor.feed(self._member.online, facts)
                self._actor.start()
                reason = await self._actor.stopped()
                await self._effects.finish()
                self._effects.close()
                return reason
        except BaseExceptionGroup as group:
            failures, others = group.split(LedgerUnsure)
            if failures is None or others is not None:
                raise  # a bug
            raise failures.exceptions[0] from None
        finally:
            self._actor.stop("broken")
            self._effects.close()
            self._bulk.close()
            if self._link is not None:
                self._link.close(linger_ms=LAST_WORDS_MS)

    def _tick(self, now: float) -> list[MemberEffect]:
        if now >= self._upkeep_at:
            self._upkeep_at = now + UPKEEP_S
            self._upkeep(now)
        return self._member.tick(now)

    def _leave(self, _: float) -> list[MemberEffect]:
        return self._member.leave("shutdown")

    def _give_up(self, _: float) -> list[MemberEffect]:
        if self._member.state == "left":
            return []
        return self._member.leave(f"forbidden: {self._patience.given_up}")

    def _upkeep(self, now: float) -> None:
        self._effects.run(self._core.tick(now))
        self._effects.collect()
        n_versions = len(self._table.by_key)
        gauges = {
            "held_bytes": self._table.held_bytes,
            "held_versions": n_versions,
            "unwritten_versions": self._core.n_unwritten,
        }
        self._vitals = Vitals(gauges=gauges)
        for peer, heard_at in list(self._bulk_peers.items()):
            if now - heard_at > BULK_SILENCE_S:
                del self._bulk_peers[peer]
                self._bulk.forget(peer)

    # --- the router's link

    def _carry_out(self, effect: MemberEffect) -> None:
        match effect:
            case Send(_, entry):
                if self._link is not None:
                    self._link.send(entry)
            case Connect(n_lost):
                if self._link is not None:
                    self._warn_of_failures()
                    self._link.close()
                self._router_at = self._routers[n_lost % len(self._routers)]
                self._link = DealerPort(
                    self._router_at, self._received, self._link_down, dialer=self._dialer
                )
            case Execute(entry):
                self._execute(entry)
            case Heed(intent, former_fleet):
                if former_fleet:
                    warn(f"this is fleet {intent.fleet}; before it was fleet {former_fleet}")
                self._effects.run(self._core.heed(intent))
            case Stop(reason):
                self._actor.stop(reason)
            case LetIn(principals):
                if self._guard is not None:
                    self._guard.hand_over(principals)
            case _:
                # Work taken away goes on: it is short, harmless, and its answer is dropped.
                pass

    def _received(self, entries: list[Entry]) -> None:
        self._actor.feed(self._member.receive, entries)
        if self._member.is_at_standby and self._link is not None:
            self._link.failure = "standby"
        if self._member.state != "leased":
            return
        if news := self._patience.joined(self._router_at):
            warn(news)
        if self._on_joined is not None:
            self._on_joined(self._endpoint)
            self._on_joined = None

    def _link_down(self) -> None:
        self._warn_of_failures()
        self._actor.feed(self._member.link_down)

    def _warn_of_failures(self) -> None:
        """Says what the store waits for, once it has waited for long."""
        if self._link is not None:
            now = self._clock.now()
            sentence = self._patience.failed(self._link.failure, self._router_at, now)
            if self._patience.given_up:
                self._actor.feed(self._give_up)
            elif sentence:
                warn(sentence)

    def _execute(self, entry: Entry) -> None:
        if not entry.rid:
            return
        key = (RequestId(entry.rid), entry.attempt)
        try:
            command = unpack(entry)
        except RemoteProtocolError as error:
            self._end("refused", key, Problem("bad_request", str(error), "not_started"))
            return
        if isinstance(command, MemberCommand):
            self._effects.handle(MemberAsker(key), command)
        elif entry.kind == "shutdown":
            self._end("finished", key, Done())
            self.stop()
        else:
            message = f"a weight store cannot {entry.kind!r}"
            self._end("failed", key, Problem("unsupported", message, "not_started"))

    def _end(self, kind: str, key: AttemptKey, body: msgspec.Struct) -> None:
        self._actor.feed(self._member.ended, kind, key, body)

    # --- the bulk socket

    def _bulk_arrived(self, peer: Peer, entries: list[Entry]) -> None:
        self._actor.feed(self._serve_bulk, peer, entries)

    def _bulk_signed(self, peer: Peer, signer: Principal, entries: list[Entry]) -> None:
        may_say = BULK_KINDS_OF.get(signer.role, frozenset[str]())
        for entry in entries:
            if entry.kind not in may_say:
                message = f"a {signer.role} may not send {entry.kind[:32]!r}"
                problem = Problem("forbidden", message, "not_started")
                self._answer(BulkAsker(peer, entry.rid), "failed", problem)
        self._bulk_arrived(peer, [entry for entry in entries if entry.kind in may_say])

    def _serve_bulk(self, peer: Peer, entries: list[Entry], now: float) -> list[MemberEffect]:
        self._bulk_peers[peer] = now
        for entry in entries:
            asker = BulkAsker(peer, entry.rid)
            try:
                command = unpack(entry)
            except RemoteProtocolError as error:
                self._answer(asker, "failed", Problem("bad_request", str(error), "not_started"))
                continue
            if isinstance(command, PullManifest | PullDelta | PullChunk | PushChunk):
                self._effects.run(self._core.handle(asker, command, now))
            else:
                message = f"{entry.kind!r} is not said on a bulk socket"
                problem = Problem("unknown_message", message, "not_started")
                self._answer(asker, "failed", problem)
        return []

    def _answer(self, asker: Asker, kind: str, body: msgspec.Struct) -> None:
        match asker:
            case MemberAsker(key):
                self._end(kind, key, body)
            case BulkAsker(peer, rid):
                self._bulk.send(peer, Entry(kind, rid, body=pack(body)))
