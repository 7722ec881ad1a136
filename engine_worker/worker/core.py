"""The worker core decides what a worker does about entries, its engine host and time.

Pure: each method takes `now` and returns effects for the shell to apply. Membership and delivery
are decided by `MemberCore`, tokens by `Generation`, control commands by `Controller`.
"""

from collections.abc import Callable, Iterable

from rolloutbus.bus.backoff import Chance
from rolloutbus.bus.membership.core import MemberCore, MemberIdentity, Vitals
from rolloutbus.bus.membership.deliveries import Execute, MemberEffect, StopSilently, StopWork
from rolloutbus.bus.membership.outbox import Outbox
from rolloutbus.bus.transport.endpoints import is_out_of_reach, store_out_of_reach
from rolloutbus.bus.wire.codec import unpack, unpack_result
from rolloutbus.bus.wire.commands import ENDINGS, done_by
from rolloutbus.bus.wire.entry import AttemptKey, Entry
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.bus.wire.messages.control import ServerFacts, Shutdown
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.generation import Abort, Deltas, Generated, Repair
from rolloutbus.bus.wire.messages.host import (
    EngineFailure,
    EngineHeartbeat,
    EngineReady,
    EngineStarting,
    Extras,
)
from rolloutbus.bus.wire.messages.membership import Prefixes, WorkerFacts
from rolloutbus.bus.wire.messages.weights import PrepareUpdate
from rolloutbus.engine_worker.prefixes import PrefixNews
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.engine_worker.worker.controller import Controller, Ending, Outcomes, key_of, refused
from rolloutbus.engine_worker.worker.effects import (
    KillHost,
    StartHost,
    TellProgress,
    ToHost,
    WorkerEffect,
)
from rolloutbus.engine_worker.worker.generation import (
    FinishedRequest,
    Generation,
    Unmeasured,
    limits_of,
    stop_in_engine,
)
from rolloutbus.engine_worker.worker.host_watch import HostEnd, HostWatch
from rolloutbus.engine_worker.worker.requests import (
    RunningRequest,
    is_pinned,
    repaired,
    repaired_from_result,
)
from rolloutbus.engine_worker.worker.streams import StreamBatcher


def worker_facts(
    policy: str, engine: EngineReady, stream: str, pid: int, adapters: dict[str, int]
) -> WorkerFacts:
    """What this worker offers; `stream`: endpoint of its PUB socket; `adapters` changes later."""
    return WorkerFacts(
        policy=policy,
        stream=stream,
        slots=engine.slots,
        max_context=engine.max_context,
        vocab_size=engine.vocab_size,
        engine=engine.engine,
        capabilities=sorted({*engine.capabilities, *done_by("worker")}),
        eos_token_ids=engine.eos_token_ids,
        pid=pid,
        host=engine.host,
        gpus=engine.gpus,
        bulk=engine.bulk,
        transports=engine.transports,
        adapters=adapters,
    )


def server_facts(
    engine: EngineReady, heartbeat: EngineHeartbeat, controller: Controller, clock_ms: int
) -> ServerFacts:
    """Result of `server_info`; counters as of the engine host's last heartbeat."""
    return ServerFacts(
        engine=engine.engine,
        version=controller.version,
        state=controller.state.name,
        steps=heartbeat.steps,
        n_running=heartbeat.n_running,
        n_waiting=heartbeat.n_waiting,
        n_kv_tokens=heartbeat.n_kv_tokens,
        vocab_size=engine.vocab_size,
        max_context=engine.max_context,
        slots=engine.slots,
        parallel=engine.parallel,
        software=engine.software,
        features=engine.features,
        adapters=controller.adapters,
        asleep=controller.state.asleep,
        clock_ms=clock_ms,
    )


def repair_ending(entry: Entry, body: Repair, generation: Generation, outbox: Outbox) -> Ending:
    """Ends a `repair`: from the running request, or from a result that still waits."""
    request = generation.get(body.rid)
    if request is not None and request.key[1] == body.attempt:
        found = repaired(request, body)
        kind = "refused" if isinstance(found, Problem) else "finished"
        return Ending(kind, key_of(entry), found)
    parcel = outbox.get((body.rid, body.attempt))
    if parcel is not None and parcel.has_result:
        result = unpack_result("generate", parcel.entry)
        assert isinstance(result, Generated)
        return Ending("finished", key_of(entry), repaired_from_result(result, body))
    message = "This attempt does not run here."
    return refused(entry, Problem("bad_request", message, "not_started", field="rid"))


FAREWELL_S = 2.0
"""Once all has ended, results wait this long for their clients' acknowledgements."""

_COUNTERS_OF_ENDINGS = {kind: f"{kind}_requests" for kind in sorted(ENDINGS)}
_DEADLINE = Problem("deadline", "The deadline passed while the request ran.", "unknown")


class WorkerCore:
    """One worker."""

    def __init__(
        self,
        settings: WorkerSettings,
        boot: str,
        stream: str,
        pid: int,
        chance: Chance,
        *,
        clock_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        """`clock_ms`: milliseconds since 1970, which are only told; 0: not known."""
        self._settings = settings
        self._clock_ms = clock_ms
        self._stream = stream
        self._pid = pid
        self._streams = StreamBatcher(settings.name, settings.streams)
        self._generation = Generation(self._streams)
        self._controller = Controller(settings.policy, self._generation)
        self._watch = HostWatch(settings.host, settings.lease.late_tick_s)
        self._member = MemberCore(
            MemberIdentity("worker", settings.name, boot),
            settings.lease,
            chance,
            self._vitals,
            settings.outbox_limit_bytes,
        )
        self._outbox = self._member.deliveries.outbox
        self._prefixes = PrefixNews()
        self._engine: EngineReady | None = None
        self._facts: WorkerFacts | None = None  # of the engine that was ready last
        self._shutdowns: list[AttemptKey] = []
        """Commands to leave: who told it so hears when what runs has ended."""
        self._drain_until: float | None = None
        self._leave_at: float | None = None
        self._shown: tuple[str, int] = ("", 0)
        self._counters = dict.fromkeys(
            (*_COUNTERS_OF_ENDINGS.values(), "repairs", "engine_exits", "given_up"), 0
        )

    @property
    def member(self) -> MemberCore:
        """Membership and delivery, for observation."""
        return self._member

    @property
    def state(self) -> str:
        """As in its heartbeats."""
        return self._controller.state.name

    @property
    def version(self) -> int:
        """Of the weights that are active."""
        return self._controller.version

    @property
    def n_running(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._generation)

    def start(self, now: float) -> list[WorkerEffect]:
        """Begin: the bus is joined once the engine is ready."""
        self._watch.started(now)
        return [StartHost()]

    def bus(self, entries: Iterable[Entry], now: float) -> list[WorkerEffect]:
        """Entries have come from the router."""
        return self._carry_out(self._member.receive(entries, now), now)

    def link_down(self, now: float) -> list[WorkerEffect]:
        """The connection to the router is gone."""
        return self._carry_out(self._member.link_down(now), now)

    def host(self, entries: Iterable[Entry], now: float) -> list[WorkerEffect]:
        """Entries have come from the engine host.

        Raises:
            RemoteProtocolError: the host broke the protocol; it must be killed.
        """
        effects: list[WorkerEffect] = []
        self._watch.spoke(now)
        self._controller.state.is_frozen = False
        for entry in entries:
            if entry.kind in ENDINGS:
                effects += self._host_ended(entry, now)
                continue
            match unpack(entry):
                case Deltas() as deltas:
                    for ended in self._generation.step(deltas, now):
                        if isinstance(ended, FinishedRequest):
                            effects += self._finish(ended, now)
                        else:
                            effects += self._fail(ended, now)
                case Extras() as extras:
                    self._generation.keep(extras)
                case EngineHeartbeat() as heartbeat:
                    self._watch.reported(heartbeat, now)
                    self._controller.reported(heartbeat)
                case EngineStarting(doing):
                    effects.append(TellProgress(doing))
                case EngineReady() as ready:
                    effects += self._engine_ready(ready, now)
                case Prefixes() as news:
                    self._prefixes.heard(news)
                case EngineFailure(message):
                    effects += self._engine_lost(self._watch.complained(message), now)
                case _:
                    raise RemoteProtocolError(f"an engine host does not say {entry.kind!r}")
        return effects + self._settle(now)

    def host_exited(
        self, reason: str, now: float, *, was_killed: bool = False
    ) -> list[WorkerEffect]:
        """The engine host is gone (see `HostWatch.ended`): leave until another one is ready."""
        self._counters["engine_exits"] += 1
        end = self._watch.ended(reason, now, was_killed=was_killed)
        may_restart = end.may_restart and self._facts is not None
        effects = self._engine_lost(end, now, is_final=not may_restart)
        if self._member.state == "left":
            return effects
        if not may_restart:
            self._controller.state.is_broken = True
            return [*effects, *self._carry_out(_give_up(self._member, self._facts, end, now), now)]
        self._watch.started(now)
        return [*effects, StartHost()]

    def _engine_lost(
        self, end: HostEnd, now: float, *, is_final: bool = False
    ) -> list[WorkerEffect]:
        """Nothing that the engine had under way will end: leave until another one is ready.

        `is_final`: another goodbye follows.
        """
        if end.is_crash:
            self._member.crashes.saw([each.key[0] for each in self._generation.all()], now)
        self._generation.clear()
        self._controller.host_lost()
        self._prefixes.host_lost()
        self._engine = None
        if is_final or self._member.state in ("away", "left"):
            return []
        return self._carry_out(self._member.offline(end.goodbye, now), now)

    def stop(self, now: float) -> list[WorkerEffect]:
        """Leave now; clients resume elsewhere what runs here."""
        if self._member.state == "left":
            return []
        return self._carry_out(self._member.leave("shutdown"), now)

    def give_up(self, reason: str, now: float) -> list[WorkerEffect]:
        """Leave for good because the router cannot be joined."""
        if self._member.state == "left":
            return []
        return self._carry_out(self._member.leave(reason), now)

    def drain(self, now: float) -> list[WorkerEffect]:
        """Take no more and leave when what runs has ended, or when `drain_s` is over.

        The second time it leaves now.
        """
        if self._drain_until is not None or not self._settings.drain_s:
            return self.stop(now)
        self._controller.state.is_draining = True
        self._drain_until = now + self._settings.drain_s
        return self._settle(now)

    def flush(self, now: float) -> list[WorkerEffect]:
        """End a loop tick in which something was received."""
        effects: list[WorkerEffect] = [*self._streams.flush(self._member.epoch)]
        shown = (self._controller.state.name, self._controller.version)
        if shown != self._shown:
            self._shown = shown
            effects += self._member.heartbeat(now)
        return [*effects, *self._member.flush(now)]

    def tick(self, now: float) -> list[WorkerEffect]:
        """Time passes; to be called every 50 ms or so."""
        effects = self._carry_out(self._member.tick(now), now)
        expired = self._generation.expired(now)
        for request in expired:
            self._generation.end(request, "abort", now)
            effects += self._end_generate(Ending("expired", request.key, _DEADLINE), now)
        if expired:
            effects += stop_in_engine(expired)
        effects += self._streams.tick(self._generation.all(), self._member.epoch, now)
        effects += self._prefixes.tick(self._member, now)
        state, in_phase = self._controller.state, self._controller.in_phase
        verdict = self._watch.verdict(now, should_move=self._is_sampling, in_phase=in_phase)
        if verdict and self._member.state != "left":
            effects.append(KillHost(verdict))
        state.is_frozen = self._watch.is_silent(now)
        return effects + self._settle(now)

    def needs_host(self, now: float) -> bool:
        """Whether requests wait for a host that is silent for long: see whether it is stopped."""
        can_move = self._is_sampling and not self._controller.in_phase
        return can_move and self._watch.is_given_up(now)

    def host_stopped(self, now: float) -> list[WorkerEffect]:
        """The host is stopped from outside: its requests go on elsewhere, it drops them later."""
        keys = [request.key for request in self._generation.all()]
        self._counters["given_up"] += len(keys)
        return [*self._generation.forget(keys), *self._member.give_up(keys, now)]

    @property
    def _is_sampling(self) -> bool:
        return len(self._generation) > 0 and self._controller.should_step

    def _carry_out(self, effects: list[MemberEffect], now: float) -> list[WorkerEffect]:
        """Replace effects that the member core means for us by what follows from them."""
        out: list[WorkerEffect] = []
        for effect in effects:
            match effect:
                case Execute(entry):
                    out += self._execute(entry, now)
                case StopSilently(keys):
                    out += self._generation.forget(keys)
                case StopWork():
                    self._controller.lease_lost()
                    running = self._member.deliveries.running
                    keys = [request.key for request in self._generation.all()]
                    out += self._generation.forget([k for k in keys if running(k[0]) is None])
                case _:
                    out.append(effect)
        return out

    def _execute(self, entry: Entry, now: float) -> list[WorkerEffect]:
        if entry.kind == "generate":
            problem = self._controller.takes_requests(is_pinned=is_pinned(entry))
            started = problem or self._generation.start(entry, self._controller.version, now)
            if isinstance(started, ToHost):
                return [started]
            return self._end_generate(refused(entry, started), now)
        if entry.kind == "server_info":
            assert self._engine is not None, "a lease needs an engine, and a command a lease"
            heartbeat = self._watch.heartbeat
            facts = server_facts(self._engine, heartbeat, self._controller, self._clock_ms())
            return self._end(Ending("finished", key_of(entry), facts), now)
        try:
            body = unpack(entry)
        except RemoteProtocolError as error:
            if entry.kind == "abort":
                self._member.counters.malformed += 1
                return []
            return self._end(refused(entry, Problem("bad_request", str(error), "not_started")), now)
        match body:
            case Abort():
                return self._abort(entry, body, now)
            case Repair():
                self._counters["repairs"] += 1
                return self._end(repair_ending(entry, body, self._generation, self._outbox), now)
            case Shutdown():
                return self._begin_shutdown(entry, body, now)
            case PrepareUpdate(bulk=bulk) if is_out_of_reach(bulk, self._settings.router):
                problem = Problem("no_store", store_out_of_reach(bulk), "not_started")
                return self._end(refused(entry, problem), now)
            case _:
                return self._apply(self._controller.submit(entry, body), now)

    def _apply(self, outcomes: Outcomes, now: float) -> list[WorkerEffect]:
        effects: list[WorkerEffect] = []
        for outcome in outcomes:
            effects += self._end(outcome, now) if isinstance(outcome, Ending) else [outcome]
        return effects

    def _end(self, ending: Ending, now: float) -> list[WorkerEffect]:
        return self._carry_out(self._member.ended(*ending, now), now)

    def _end_generate(self, ending: Ending, now: float) -> list[WorkerEffect]:
        self._counters[_COUNTERS_OF_ENDINGS[ending.kind]] += 1
        return self._end(ending, now)

    def _finish(self, finished: FinishedRequest, now: float) -> list[WorkerEffect]:
        request, reason = finished
        kind = "cancelled" if reason == "abort" else "finished"
        return self._end_generate(Ending(kind, request.key, request.generated(reason, now)), now)

    def _fail(self, unmeasured: Unmeasured, now: float) -> list[WorkerEffect]:
        request, problem = unmeasured
        stopped = stop_in_engine([request])
        return [*stopped, *self._end_generate(Ending("failed", request.key, problem), now)]

    def _cancel(self, requests: list[RunningRequest], now: float) -> list[WorkerEffect]:
        """End these now with what they hold; a step still under way is ignored."""
        effects: list[WorkerEffect] = [*stop_in_engine(requests)]
        for request in requests:
            effects += self._finish(self._generation.end(request, "abort", now), now)
        return effects

    def _abort(self, entry: Entry, body: Abort, now: float) -> list[WorkerEffect]:
        rids = dict.fromkeys(body.rids)  # each of them ends once
        running = [request for rid in rids if (request := self._generation.get(rid))]
        known = {str(request.key[0]) for request in running}
        self._member.deliveries.bury((rid for rid in rids if rid not in known), now)
        effects = self._cancel(running, now)
        return [*effects, *self._end(Ending("finished", key_of(entry), Done()), now)]

    def _host_ended(self, entry: Entry, now: float) -> list[WorkerEffect]:
        request = self._generation.get(entry.rid)
        if request is not None and request.key == key_of(entry):
            self._generation.forget([request.key])
            return self._end_generate(Ending(entry.kind, request.key, entry.body), now)
        return self._apply(self._controller.host_ended(entry), now)

    def _engine_ready(self, ready: EngineReady, now: float) -> list[WorkerEffect]:
        self._engine = ready
        self._watch.ready(now)
        self._generation.limits = limits_of(ready)
        policy, adapters = self._settings.policy, self._generation.adapters
        self._facts = worker_facts(policy, ready, self._stream, self._pid, adapters)
        return self._apply(self._controller.engine_ready(ready), now)

    def _begin_shutdown(self, entry: Entry, body: Shutdown, now: float) -> list[WorkerEffect]:
        self._controller.state.is_draining = True
        self._shutdowns.append(key_of(entry))
        if body.drain:
            return self._settle(now)
        effects = self._cancel(list(self._generation.all()), now)
        return [*effects, *self._say_farewell(now), *self._settle(now)]

    def _settle(self, now: float) -> list[WorkerEffect]:
        """Do what waited: join once there is an engine, commit, shut down, leave after that."""
        effects = self._apply(self._controller.unpark(), now)
        if self._facts and self._controller.may_join and self._member.state == "away":
            effects += self._carry_out(self._member.online(self._facts, now), now)
        has_work = len(self._generation) > 0 or self._controller.has_work
        is_drained = self._drain_until is not None and self._leave_at is None
        if (self._shutdowns or is_drained) and not has_work:
            effects += self._say_farewell(now)
        if self._drain_until is not None and now >= self._drain_until and has_work:
            effects += self.stop(now)
        if self._leave_at is not None and (not len(self._outbox) or now >= self._leave_at):
            self._leave_at = None
            effects += self.stop(now)
        return effects

    def _say_farewell(self, now: float) -> list[WorkerEffect]:
        """All has ended: end each `shutdown` that asked for it, and leave soon."""
        self._leave_at = now + FAREWELL_S
        keys, self._shutdowns = self._shutdowns, []
        effects: list[WorkerEffect] = []
        for key in keys:
            effects += self._end(Ending("finished", key, Done()), now)
        return effects

    def _vitals(self) -> Vitals:
        slots = self._engine.slots if self._engine else 0
        return Vitals(
            version=self._controller.version,
            state=self._controller.state.name,
            steps=self._watch.heartbeat.steps,
            free=max(0, slots + slots // 4 + 1 - len(self._generation)),
            n_tokens=self._generation.n_sampled,
            stalled_ms=self._controller.stalled_ms,
            counters={**self._counters, **self._generation.counters},
            durations={
                name: counter.counted()
                for name, counter in (
                    ("first_token", self._generation.first_tokens),
                    ("next_token", self._generation.next_tokens),
                    ("update_stall", self._controller.stalls),
                )
                if counter.has_any
            },
        )


def _give_up(
    member: MemberCore, facts: WorkerFacts | None, end: HostEnd, now: float
) -> list[MemberEffect]:
    """Leave for good, and let the router know that it is the engine which is bad."""
    effects: list[MemberEffect] = []
    if member.state == "away" and facts is not None:
        # It left when the last engine died, and none has started since.
        effects = member.online(facts, now)
    elif not end.is_crash:
        effects = member.offline(end.goodbye, now)
    return [*effects, *member.leave(f"engine_failed: {end.reason}")]
