"""Control commands on their way to the engine host: one at a time of each kind.

Commands of different kinds overtake each other: a `resume` must not wait for a `pause` that
drains, nor anything for a weight transfer.
"""

from collections import deque

from rolloutbus.bus.wire.commands import COMMANDS, done_by
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.ids import AttemptKey, RequestId
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.engine_worker.worker.effects import ToHost

HOST_COMMANDS = done_by("engine")
"""Commands that the engine host carries out."""
READING = frozenset(kind for kind in HOST_COMMANDS if "paused" in COMMANDS[kind].refused_in)
"""Those that compute with the model, beside generation."""
MAX_WAITING = 64
"""Commands of one kind that wait; more are refused."""


class ControlLanes:
    """What runs in the host and what waits for it, per kind."""

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

    def submit(self, entry: Entry) -> list[ToHost] | Problem:
        """Pass a command on, now or when its turn comes."""
        if entry.kind not in self._running:
            return [self._pass_on(entry)]
        waiting = self._waiting.setdefault(entry.kind, deque())
        if len(waiting) >= MAX_WAITING:
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
        self._running[entry.kind] = (RequestId(entry.rid), entry.attempt)
        return ToHost(Entry(entry.kind, entry.rid, entry.attempt, body=entry.body))
