"""What a worker is doing, in one word, and which commands it refuses then."""

from rolloutbus.bus.wire.commands import COMMANDS
from rolloutbus.bus.wire.messages.endings import Problem

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
    """Facts that the state follows from."""

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
        phase = self._phase()
        return "frozen" if self.is_frozen and phase in ("ready", "updating") else phase

    @property
    def phase(self) -> str:
        """What commands are judged by; the most restrictive one wins."""
        return self._phase()

    def _phase(self) -> str:
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
