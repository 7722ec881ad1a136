"""Workers of a timeline: their states, their weights and what updates did to them.

Pure. Times are seconds since the beginning of the recording.
"""

from collections.abc import Iterable
from typing import cast, get_args

from rolloutbus.bus.wire.codec import unpack, unpack_as, unpack_result
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.membership import Heartbeat, Hello, Member
from rolloutbus.bus.wire.messages.weights import Committed, CommitUpdate, Prepared, PrepareUpdate
from rolloutbus.replay.timeline.lanes import LaneSpan, SpanKind, Track

SHOWN: frozenset[str] = frozenset(get_args(SpanKind))
MIB = 1024 * 1024
_AFTER: dict[str, SpanKind | None] = {"pause": "paused", "resume": None, "sleep": "asleep"}
"""The state that a finished command leaves its worker in; heartbeats tell it too, but later."""
_FOLLOWED = {*_AFTER, "prepare_update", "commit_update"}


class WorkerTrack:
    """One worker, while its story is heard."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.policy = self.engine = ""
        self.slots = 0
        self.boot = ""
        """Name of its process."""
        self.heard_s = 0.0
        """When anything was last heard from it."""
        self.versions = Track()
        self.states = Track()
        self.weights: list[LaneSpan] = []
        self.commands: dict[str, tuple[Entry, float]] = {}
        """Sent to it and not ended, by rid: with the time when it was first sent."""

    @property
    def is_gone(self) -> bool:
        """Whether the router has given it up."""
        return self.states.kind == "gone"

    def leave(self, at_s: float, why: str) -> None:
        """Marks the worker as gone since it was last heard."""
        if self.is_gone:
            return
        since_s = min(self.heard_s, at_s)
        self.versions.close(since_s)
        self.states.change("gone", since_s, note=why)
        self.commands.clear()

    def is_process(self, boot: str, at_s: float) -> None:
        """Records the worker's process; a new process has lost the state of the one before."""
        if self.boot and boot != self.boot:
            self.leave(at_s, "another process has taken its place")
        self.boot = boot

    def heartbeat(self, state: str, version: int, at_s: float) -> None:
        """Records the worker's state, from its heartbeat or from the router."""
        self.heard_s = at_s
        self.versions.change("version", at_s, version)
        kind = cast("SpanKind", state) if state in SHOWN else None
        self.states.change(kind, at_s)


class WorkerBook:
    """Follows every worker that a recording speaks of."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerTrack] = {}

    def heard(self, name: str, at_s: float) -> None:
        """Anything came from it."""
        worker = self.workers.get(name)
        if worker is not None:
            worker.heard_s = at_s

    def hello(self, entry: Entry, at_s: float) -> None:
        """An actor came, or came back."""
        body = unpack_as(Hello, entry)
        if body.worker is None:
            return
        worker = self._at(body.name)
        worker.is_process(body.boot, at_s)
        worker.policy, worker.engine = body.worker.policy, body.worker.engine
        worker.slots = body.worker.slots

    def heartbeat(self, name: str, entry: Entry, at_s: float) -> None:
        """A member heartbeats; only those that said they are workers count."""
        worker = self.workers.get(name)
        if worker is not None:
            body = unpack_as(Heartbeat, entry)
            worker.heartbeat(body.state, body.version, at_s)

    def members(self, found: Iterable[Member], at_s: float, *, tells_all: bool) -> None:
        """Takes the router's list of workers. `tells_all`: no other record has their states."""
        names: set[str] = set()
        for member in found:
            names.add(member.name)
            worker = self._at(member.name)
            worker.is_process(member.epoch.partition(".")[0], at_s)
            worker.policy = member.policy
            if tells_all or worker.is_gone:
                worker.heartbeat(member.state, member.version, at_s)
        for name, worker in self.workers.items():
            if name not in names:
                worker.leave(at_s, "the router has taken it off its list")

    def goodbye(self, name: str, reason: str, at_s: float) -> None:
        """A worker leaves by itself."""
        worker = self.workers.get(name)
        if worker is not None:
            worker.leave(at_s, reason or "it left")

    def sent(self, name: str, entry: Entry, at_s: float) -> None:
        """The router sent something to a worker, perhaps again."""
        if entry.kind in _FOLLOWED:
            self._at(name).commands.setdefault(entry.rid, (entry, at_s))

    def ended(self, name: str, entry: Entry, at_s: float) -> None:
        """A worker says how a command ended."""
        worker = self.workers.get(name)
        if worker is None:
            return
        command, sent_s = worker.commands.pop(entry.rid, (None, 0.0))
        if command is None:
            return
        if command.kind == "prepare_update":
            worker.weights.append(_pull(command, entry, sent_s, at_s))
        elif command.kind == "commit_update":
            self._committed(worker, command, entry, (sent_s, at_s))
        elif entry.kind == "finished":
            kind = _AFTER[command.kind]
            worker.states.change(kind, at_s)

    def interrupt(self, at_s: float, again_s: float) -> None:
        """Nothing was heard for a while."""
        for worker in self.workers.values():
            worker.versions.close(at_s)
            worker.states.close(at_s)
            worker.commands.clear()
            worker.boot, worker.heard_s = "", again_s

    def close(self, at_s: float) -> None:
        """The recording ends."""
        for worker in self.workers.values():
            for command, sent_s in worker.commands.values():
                if command.kind in ("prepare_update", "commit_update"):
                    kind: SpanKind = "pull" if command.kind == "prepare_update" else "commit"
                    version = cast("PrepareUpdate | CommitUpdate", unpack(command)).version
                    worker.weights.append(
                        LaneSpan(kind, sent_s, at_s, version, note="no end heard")
                    )
        self.interrupt(at_s, at_s)

    def _at(self, name: str) -> WorkerTrack:
        worker = self.workers.get(name)
        if worker is None:
            worker = self.workers[name] = WorkerTrack(name)
        return worker

    def _committed(
        self, worker: WorkerTrack, command: Entry, entry: Entry, when: tuple[float, float]
    ) -> None:
        sent_s, at_s = when
        body = unpack_as(CommitUpdate, command)
        if entry.kind != "finished":
            note = f"{body.in_flight}, {entry.kind}"
            worker.weights.append(LaneSpan("commit", sent_s, at_s, body.version, note=note))
            return
        result = cast("Committed", unpack_result("commit_update", entry))
        note = f"{body.in_flight}; stall {result.stall_ms:.2f} ms"
        worker.weights.append(LaneSpan("commit", sent_s, at_s, body.version, note=note))
        began_s = max(sent_s, at_s - result.stall_ms / 1000)
        cost = f"{result.n_retracted} retracted, {result.n_aborted} aborted"
        worker.weights.append(
            LaneSpan("stall", began_s, at_s, body.version, note=f"{result.stall_ms:.2f} ms; {cost}")
        )
        worker.versions.change("version", at_s, result.version)


def _pull(command: Entry, entry: Entry, sent_s: float, at_s: float) -> LaneSpan:
    version = unpack_as(PrepareUpdate, command).version
    if entry.kind != "finished":
        return LaneSpan("pull", sent_s, at_s, version, note=entry.kind)
    result = cast("Prepared", unpack_result("prepare_update", entry))
    way = result.transport or "already there"
    size = f"{result.size_bytes / MIB:.2f} MiB, {result.moved_bytes / MIB:.2f} moved"
    return LaneSpan("pull", sent_s, at_s, version, note=f"{way}, {size}, {result.pull_ms:.1f} ms")
