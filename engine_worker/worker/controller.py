"""Control commands of one worker: what state they are allowed in, what they change."""

from collections import deque
from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec
from msgspec import Raw

from rolloutbus.bus.wire.codec import pack, unpack, unpack_result
from rolloutbus.bus.wire.command_checks import check_command
from rolloutbus.bus.wire.commands import COMMANDS, done_by
from rolloutbus.bus.wire.durations import DurationCounter
from rolloutbus.bus.wire.entry import NO_ATTEMPT, AttemptKey, Entry, RequestId
from rolloutbus.bus.wire.messages.control import Adapters, LoadLora, Memory, Sleep
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.host import EngineHeartbeat, EngineReady
from rolloutbus.bus.wire.messages.weights import Committed, CommitUpdate, Prepared, PrepareUpdate
from rolloutbus.engine_worker.features import cannot_do
from rolloutbus.engine_worker.worker.effects import ToHost
from rolloutbus.engine_worker.worker.generation import Generation


class Ending(NamedTuple):
    """How a command ended."""

    kind: str
    key: AttemptKey
    body: msgspec.Struct | Raw


Outcomes = list[ToHost | Ending]


def refused(entry: Entry, problem: Problem) -> Ending:
    """The command was not started: perhaps another time, or with other values, or never here."""
    kind = "failed" if problem.code == "unsupported" else "refused"
    return Ending(kind, key_of(entry), problem)


def key_of(entry: Entry) -> AttemptKey:
    """The execution that a command entry asks for."""
    return RequestId(entry.rid), entry.attempt


class ReloadList:
    """Keeps the adapters that an engine has, for the engine that follows it when it dies."""

    def __init__(self) -> None:
        self._asked: dict[AttemptKey, LoadLora] = {}
        """Being loaded."""
        self._loaded: dict[str, LoadLora] = {}
        """By name: how each was had."""
        self._due: set[AttemptKey] = set()

    @property
    def is_reloading(self) -> bool:
        """Whether the engine does not have all yet that the one before it had."""
        return bool(self._due)

    def asked(self, key: AttemptKey, ask: LoadLora) -> None:
        """The engine is loading one."""
        self._asked[key] = ask

    def ended(self, key: AttemptKey, adapters: Collection[str] | None) -> None:
        """The engine has loaded or unloaded one; `adapters`: all it has now, None: it failed."""
        self._due.discard(key)
        ask = self._asked.pop(key, None)
        if adapters is None:
            return
        if ask is not None:
            self._loaded[ask.name] = ask
        self._loaded = {name: each for name, each in self._loaded.items() if name in adapters}

    def reload(self) -> list[Entry]:
        """Commands for an engine that has just begun; only this list gets their endings."""
        entries = [
            Entry("load_lora", RequestId(f"again/{name}"), NO_ATTEMPT, body=pack(ask))
            for name, ask in self._loaded.items()
        ]
        for entry, ask in zip(entries, self._loaded.values(), strict=True):
            self._due.add(key_of(entry))
            self._asked[key_of(entry)] = ask
        return entries

    def host_lost(self) -> None:
        """The engine is gone; what it was still to load, the next one loads."""
        for key in self._due:
            self._loaded[self._asked[key].name] = self._asked[key]
        self._asked.clear()
        self._due.clear()


_HINTS = {
    "starting": "Its engine is not up yet.",
    "broken": "Its engine has failed.",
    "draining": "It is shutting down.",
    "torn": "Its weights are half overwritten; it waits for a whole version.",
    "updating": "Wait for the weight update to end.",
    "asleep": "Send wake_up first.",
    "paused": "Send resume first.",
}


class WorkerState:
    """What a worker is doing, in one word, and which commands it refuses then."""

    def __init__(self) -> None:
        self.is_host_ready = False
        self.is_draining = False
        self.is_broken = False
        self.is_updating = False
        self.is_torn = False
        """The weights are being overwritten, or half overwritten."""
        self.is_paused = False
        self.is_frozen = False
        """The engine host has fallen silent."""
        self.asleep: list[str] = []
        """Memory tags released now."""

    @property
    def name(self) -> str:
        """As in `Heartbeat.state`.

        A silent host only keeps new requests away: what else a state refuses, and what waits,
        does not change with it.
        """
        is_silent = self.is_frozen and self.phase in ("ready", "updating")
        return "frozen" if is_silent else self.phase

    @property
    def phase(self) -> str:
        """What commands are judged by; the most restrictive one wins."""
        if self.is_broken:
            return "broken"
        if not self.is_host_ready:
            return "starting"
        if self.is_draining:
            return "draining"
        if self.asleep:
            return "asleep"
        if self.is_torn:
            return "torn"
        if self.is_updating:
            return "updating"
        return "paused" if self.is_paused else "ready"

    def host_lost(self) -> None:
        """A new host knows nothing of pauses and sleep."""
        self.is_host_ready = self.is_updating = self.is_paused = self.is_frozen = False
        self.is_torn = False
        self.asleep = []

    def refusal(self, command: str) -> Problem | None:
        """Why this command cannot be started now."""
        for state in (self.phase, "updating" if self.is_updating else "ready"):
            if self._refuses(state, command):
                code = "update_in_progress" if state == "updating" else "not_ready"
                message = f"This worker is {state}. {_HINTS[state]}"
                return Problem(code, message, "not_started", retry_after_ms=250)
        return None

    def _refuses(self, state: str, command: str) -> bool:
        if state in ("starting", "broken"):
            return True
        refused_in = COMMANDS[command].refused_in
        has_none = state == "asleep" and "weights" in self.asleep
        return state in refused_in or (has_none and "no_weights" in refused_in)


HOST_COMMANDS = done_by("engine")
"""Commands that the engine host carries out."""
READING = frozenset(kind for kind in HOST_COMMANDS if "paused" in COMMANDS[kind].refused_in)
"""Commands that compute with the model, beside generation."""
MAX_WAITING = 64
"""Commands of one kind that wait; more are refused."""


class ControlLanes:
    """Passes control commands to the engine host, one at a time of each kind.

    Commands of different kinds overtake each other: a `resume` must not wait for a `pause` that
    drains, nor anything for a weight transfer.
    """

    def __init__(self) -> None:
        self._running: dict[str, AttemptKey] = {}
        self._waiting: dict[str, deque[Entry]] = {}

    def is_running(self, kind: str) -> bool:
        """Whether a command of this kind is in the host now."""
        return kind in self._running

    @property
    def in_phase(self) -> bool:
        """Whether a command is in the host now that may take minutes."""
        return any("slow" in COMMANDS[kind].traits for kind in self._running)

    @property
    def has_work(self) -> bool:
        """Whether a command is in the host now whose ending somebody needs.

        Weights on their way serve nobody once the worker is to leave.
        """
        return bool(self._running.keys() - {"prepare_update"})

    def submit(self, entry: Entry, limit: int = MAX_WAITING) -> list[ToHost] | Problem:
        """Pass a command on, now or when its turn comes; `limit`: of those that wait."""
        if entry.kind not in self._running:
            return [self._pass_on(entry)]
        waiting = self._waiting.setdefault(entry.kind, deque())
        if len(waiting) >= limit:
            message = f"{len(waiting)} commands of this kind are waiting; try again later."
            return Problem("busy", message, "not_started", retry_after_ms=1000)
        waiting.append(entry)
        return []

    def kind_of(self, key: AttemptKey) -> str | None:
        """Which command this execution in the host is; None if it is not there."""
        return next((kind for kind, running in self._running.items() if running == key), None)

    def ended(self, kind: str) -> list[ToHost]:
        """The host has ended its command of this kind: the next one may go."""
        del self._running[kind]
        waiting = self._waiting.get(kind)
        return [self._pass_on(waiting.popleft())] if waiting else []

    def drop_waiting(self) -> None:
        """The lease is over: what waits has no owner; what runs in the host goes on to its end."""
        self._waiting.clear()

    def clear(self) -> None:
        """The host is gone, and all of it with it."""
        self._running.clear()
        self._waiting.clear()

    def _pass_on(self, entry: Entry) -> ToHost:
        self._running[entry.kind] = key_of(entry)
        return ToHost(Entry(entry.kind, entry.rid, entry.attempt, body=entry.body))


class Controller:
    """Gate between control commands and the engine host; owner of the worker's state."""

    def __init__(self, policy: str, generation: Generation) -> None:
        self.state = WorkerState()
        self._capabilities: frozenset[str] = frozenset()
        self._vocab_size = 0
        self._max_context = 0
        self.version = 0
        """Weights that the engine has active."""
        self.stalled_ms = 0.0
        """Generation stall of the last update."""
        self.stalls = DurationCounter()
        """Of all updates."""
        self._policy = policy
        self._generation = generation
        self._lanes = ControlLanes()
        self._memory = ReloadList()
        self._parked_commit: Entry | None = None
        self._released: list[str] = []
        """Memory tags released, as the host reported last."""
        self._was_paused = False
        """Before the pause that the host is at: it stays so if that one fails."""

    @property
    def adapters(self) -> dict[str, int]:
        """Versions of the loaded adapters, by name."""
        return dict(self._generation.adapters)

    @property
    def may_join(self) -> bool:
        """Whether there is an engine, with all adapters that the one before it had."""
        return self.state.is_host_ready and not self._memory.is_reloading

    @property
    def in_phase(self) -> bool:
        """Whether the engine moves weights or memory, which may take minutes."""
        return self._lanes.in_phase

    @property
    def should_step(self) -> bool:
        """Whether the engine makes steps if it has requests; `state` does not tell it alone.

        One that leaves may be paused, and one whose commit waits for requests serves those.
        """
        state = self.state
        is_held = state.is_paused or state.is_torn or bool(state.asleep)
        is_able = state.is_host_ready and not state.is_broken
        return is_able and not is_held and not self._lanes.is_running("commit_update")

    @property
    def has_work(self) -> bool:
        """Whether the engine carries out a command that a worker ends before it leaves."""
        return self._lanes.has_work

    def takes_requests(self, *, is_pinned: bool) -> Problem | None:
        """Why a `generate` cannot be started now; None if it can.

        A pinned one asks for exactly the present weights, which a commit that the engine already
        has is about to replace.
        """
        if self._parked_commit is not None:
            message = "A weight update waits for requests that are pinned to the old version."
            return Problem("not_ready", message, "not_started", retry_after_ms=250)
        if is_pinned and self.state.is_updating:
            message = "A weight update is replacing the version that is asked for."
            return Problem("not_ready", message, "not_started", retry_after_ms=250)
        return self.state.refusal("generate")

    def reported(self, heartbeat: EngineHeartbeat) -> None:
        """The host has reported its weights."""
        self.version = max(self.version, heartbeat.version)
        self.state.is_torn = heartbeat.torn

    def engine_ready(self, ready: EngineReady) -> Outcomes:
        """An engine has begun; returns what it is to do before it serves requests."""
        self.state.is_host_ready = True
        self._capabilities = frozenset(ready.capabilities)
        self._vocab_size, self._max_context = ready.vocab_size, ready.max_context
        self._note_adapters(ready.adapters)
        outcomes: Outcomes = []
        again = self._memory.reload()
        for entry in again:
            submitted = self._lanes.submit(entry, len(again))
            assert not isinstance(submitted, Problem), "there is room for all"
            outcomes += submitted
        return outcomes

    def submit(self, entry: Entry, body: msgspec.Struct) -> Outcomes:
        """Start a control command, or end it at once; `body` is the entry's."""
        if entry.kind not in HOST_COMMANDS or entry.kind not in self._capabilities:
            return [refused(entry, cannot_do(entry.kind))]
        problem = (
            self.state.refusal(entry.kind)
            or self._misplaced(body)
            or check_command(body, vocab_size=self._vocab_size, max_context=self._max_context)
        )
        if problem is not None:
            return [refused(entry, problem)]
        if isinstance(body, PrepareUpdate | CommitUpdate):
            early = self._known_version(entry, body)
            if early is not None:
                return [early]
            if isinstance(body, CommitUpdate) and self._generation.n_pinned:
                return self._park(entry)
        return self._pass_on(entry, body)

    def host_ended(self, entry: Entry) -> Outcomes:
        """The host has ended a command; returns its ending and what may go next.

        It counts even if the lease it came under is over: the engine has changed all the same.
        """
        key = key_of(entry)
        command = self._lanes.kind_of(key)
        if command is None:
            return []
        adapters: Mapping[str, int] | None = None
        if entry.kind == "finished":
            result = unpack_result(command, entry)
            self._changed(command, result)
            adapters = result.adapters if isinstance(result, Adapters) else None
        elif command == "pause":
            self.state.is_paused = self._was_paused
        elif command == "sleep":
            self.state.asleep = self._released
        if command in ("load_lora", "unload_lora"):
            self._memory.ended(key, adapters)
        following = self._lanes.ended(command)
        for each in following:
            self._note_begun(each.entry)
        self._note_update()
        return [Ending(entry.kind, key, entry.body), *following]

    def unpark(self) -> Outcomes:
        """The last request that a commit waits for may have ended."""
        entry = self._parked_commit
        if entry is None or self._generation.n_pinned:
            return []
        self._parked_commit = None
        return self._pass_on(entry, unpack(entry))

    def lease_lost(self) -> None:
        """The commands that wait were sent under a lease that has ended; drop them."""
        self._parked_commit = None
        if not self._memory.is_reloading:
            self._lanes.drop_waiting()
        self._note_update()

    def host_lost(self) -> None:
        """The host is gone; the next one begins with its first weights."""
        self._parked_commit = None
        self._lanes.clear()
        self._memory.host_lost()
        self.state.host_lost()
        self._released = []
        self._note_adapters({})
        self.version = 0

    def _pass_on(self, entry: Entry, body: msgspec.Struct) -> Outcomes:
        submitted = self._lanes.submit(entry)
        if isinstance(submitted, Problem):
            return [refused(entry, submitted)]
        if isinstance(body, LoadLora):
            self._memory.asked(key_of(entry), body)
        for each in submitted:
            self._note_begun(each.entry)
        self._note_update()
        return [*submitted]

    def _note_begun(self, entry: Entry) -> None:
        """The host gets a command: new requests must not slip in while it is still at it."""
        if entry.kind == "pause":
            self._was_paused, self.state.is_paused = self.state.is_paused, True
        elif entry.kind == "sleep":
            body = unpack(entry)
            assert isinstance(body, Sleep)
            self.state.asleep = sorted({*self.state.asleep, *body.tags})

    def _park(self, entry: Entry) -> Outcomes:
        if self._parked_commit is not None:
            message = "Another commit is waiting on this worker."
            return [refused(entry, Problem("update_in_progress", message, "not_started"))]
        self._parked_commit = entry
        self._note_update()
        return []

    def _misplaced(self, body: msgspec.Struct) -> Problem | None:
        if isinstance(body, Sleep) and len(self._generation):
            message = (
                f"{len(self._generation)} requests run; pause with `abort` or `drain` first, as "
                "sleep(abort_first=True) and sleep(drain=True) do."
            )
            return Problem("busy", message, "not_started", retry_after_ms=1000)
        if isinstance(body, Sleep) and any(self._lanes.is_running(kind) for kind in READING):
            message = "The engine reads texts to score or embed them; wait for it."
            return Problem("busy", message, "not_started", retry_after_ms=1000)
        if isinstance(body, PrepareUpdate | CommitUpdate) and body.policy != self._policy:
            message = f"This worker serves policy {self._policy!r}."
            return Problem("bad_request", message, "not_started", field="policy")
        return None

    def _known_version(self, entry: Entry, body: PrepareUpdate | CommitUpdate) -> Ending | None:
        if body.version > self.version or (self.state.is_torn and body.version == self.version):
            return None
        if body.version < self.version:
            message = f"This worker already has version {self.version}."
            problem = Problem("stale_version", message, "not_started", field="version")
            return Ending("failed", key_of(entry), problem)
        done = (
            Prepared(body.version, 0, "", 0.0)
            if isinstance(body, PrepareUpdate)
            else Committed(body.version, 0.0)
        )
        return Ending("finished", key_of(entry), done)

    def _changed(self, command: str, result: msgspec.Struct) -> None:
        match result:
            case Committed(version, stall_ms):
                self.version = max(self.version, version)
                self.stalled_ms = stall_ms
                self.stalls.add(stall_ms / 1000)
            case Memory(asleep=asleep):
                self.state.asleep = self._released = list(asleep)
            case Adapters(adapters):
                self._note_adapters(adapters)
            case _ if command == "resume":
                self.state.is_paused = self._was_paused = False
            case _:
                pass

    def _note_adapters(self, adapters: Mapping[str, int]) -> None:
        # In place: the worker's facts hold this dict, so that every hello says what is loaded then.
        known = self._generation.adapters
        known.clear()
        known.update(adapters)

    def _note_update(self) -> None:
        is_parked = self._parked_commit is not None
        self.state.is_updating = is_parked or self._lanes.is_running("commit_update")
