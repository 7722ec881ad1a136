"""What a worker is doing, in one word, and which commands it refuses then."""

from rolloutbus.bus.wire.messages.endings import Problem

_NO_WORK: dict[str, str] = dict.fromkeys(("generate", "score", "embed", "rerank"), "not_ready")

REFUSALS: dict[str, dict[str, str]] = {
    "starting": {"*": "not_ready"},
    "broken": {"*": "not_ready"},
    "draining": {**_NO_WORK, "sleep": "not_ready"},
    "torn": {
        "*": "not_ready",
        "prepare_update": "",
        "commit_update": "",
        "abort_update": "",
        "sleep": "",
        "wake_up": "",
    },
    "updating": dict.fromkeys(("sleep", "load_lora", "save_weights"), "update_in_progress"),
    "asleep": {
        **_NO_WORK,
        "commit_update": "not_ready",
        "prepare_update": "not_ready",
        "load_lora": "not_ready",
        "unload_lora": "not_ready",
        "save_weights": "not_ready",
    },
    "paused": _NO_WORK,
    "ready": {},
}
"""state -> command -> error code; empty: none. `*` stands for every other command that the engine
carries out."""

_NEED_WEIGHTS = frozenset({"prepare_update", "commit_update", "save_weights"})
"""Refused to a sleeper only while its weights are released."""

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
        """As in `Beat.state`.

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
            row = REFUSALS[state]
            code = row.get(command, row.get("*", ""))
            has_weights = state == "asleep" and "weights" not in self.asleep
            if code and not (has_weights and command in _NEED_WEIGHTS):
                message = f"This worker is {state}. {_HINTS[state]}"
                return Problem(code, message, "not_started", retry_after_ms=250)
        return None
