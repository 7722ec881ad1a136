"""One version on its way to workers: its record and its life cycle."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from bus.life import following
from bus.messages.weights import PublishVersion

UpdateState = Literal["preparing", "recording", "committing", "committed", "aborted"]

UPDATE_LIFE: dict[UpdateState, dict[str, UpdateState]] = {
    # workers pull and verify the bytes beside the weights they serve with
    "preparing": {"prepared": "recording", "rule_broken": "aborted"},
    # the store writes the decision; from here on the version counts
    "recording": {"recorded": "committing", "not_recorded": "aborted"},
    # workers swap, each between two of its steps
    "committing": {"done": "committed"},
    "committed": {},
    "aborted": {},
}
"""state -> event -> state of an update."""

SILENT = "silent"
"""How the problem of a worker begins that was lost or had not answered at the deadline."""


@dataclass(slots=True)
class Update:
    """One transaction; `on_end` is called once, when it is committed or aborted."""

    name: str
    """Prefix of its member commands' ids; unique for ever, so that no member mistakes it for an
    update of an earlier router."""
    body: PublishVersion
    deadline_at: float
    on_end: "Callable[[Update, float], None]"
    is_catch_up: bool = False
    """The decision was recorded long ago: bring one worker there."""
    state: UpdateState = "preparing"
    targets: list[str] = field(default_factory=list[str])
    problems: dict[str, str] = field(default_factory=dict[str, str])
    """Worker -> why it is not active."""
    stalls_ms: dict[str, float] = field(default_factory=dict[str, float])

    def advance(self, event: str) -> None:
        """Move along UPDATE_LIFE.

        Raises:
            LocalProtocolError: the event has no meaning in this state; nothing changed.
        """
        self.state = following(UPDATE_LIFE, self.state, event, f"update {self.name}")

    @property
    def ready(self) -> list[str]:
        """Targets without a problem so far."""
        return [name for name in self.targets if name not in self.problems]

    @property
    def met_only_silence(self) -> bool:
        """Nothing was refused and nothing failed: everybody who is missing was lost."""
        return all(problem.startswith(SILENT) for problem in self.problems.values())

    @property
    def satisfies_its_rule(self) -> bool:
        """Whether enough targets are without a problem."""
        n_ready, n_targets = len(self.ready), len(self.targets)
        if self.body.require == "all":
            return n_ready == n_targets
        if self.body.require == "quorum":
            return n_ready * 2 > n_targets
        return n_ready > 0
