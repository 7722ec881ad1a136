"""One version on its way to workers: its record and its life cycle."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rolloutbus.bus.actor.effects import next_state
from rolloutbus.bus.wire.messages.weights import (
    Prepared,
    PublishVersion,
    UpdateProgress,
    UpdateStatus,
)
from rolloutbus.router.updates.transport_plan import Way

RULES = "all, quorum, any and at-least:N (N from 1 on)"
COUNTS_ALL = frozenset({"all", "quorum"})
"""Rules for which it matters how many workers there are in all."""


def n_needed(require: str, n_targets: int) -> int | None:
    """How many of `n_targets` expected workers the rule asks for; None if there is no such rule."""
    match require.partition(":"):
        case ("all", "", ""):
            return n_targets
        case ("quorum", "", ""):
            return n_targets // 2 + 1
        case ("any", "", ""):
            return 1
        case ("at-least", _, n) if n.isascii() and n.isdecimal() and int(n) > 0:
            return int(n)
        case _:
            return None


def next_wave(left: Sequence[str], serving: Collection[str], floor: int) -> list[str]:
    """Returns the workers whose commit begins now; at least one while some are left.

    Args:
        left: prepared workers that have not begun, in the order in which they shall.
        serving: all workers of the policy that take requests now, whether they take part or not.
        floor: so many of those go on meanwhile; where there are too few, one at a time swaps.
    """
    if floor == 0:
        return list(left)
    idle = [name for name in left if name not in serving]
    n_spare = max(len(serving) - floor, 0 if idle else 1)
    return idle + [name for name in left if name in serving][:n_spare]


UpdateState = Literal["preparing", "recording", "committing", "committed", "aborted", "unknown"]

UPDATE_LIFE: dict[UpdateState, dict[str, UpdateState]] = {
    # workers pull and verify the bytes beside the weights they serve with
    "preparing": {"prepared": "recording", "rule_broken": "aborted", "called_off": "aborted"},
    # the store writes the decision; from here on the version counts
    "recording": {"recorded": "committing", "not_recorded": "aborted", "called_off": "aborted",
                  "no_answer": "unknown"},
    # workers swap, each between two of its steps
    "committing": {"done": "committed"},
    "committed": {},
    "aborted": {},
    # the store may have written it down: it is asked until it says so
    "unknown": {},
}  # fmt: skip

SILENT = "silent"
"""How the problem of a worker begins that was lost or had not answered at the deadline."""


COMMIT_S = 5.0
COMMIT_SHARE = 0.1
"""Kept of an update's time for the store to record it and workers to commit: at most the first in
seconds, or this share if that is less."""


class Watcher(NamedTuple):
    """Callbacks of one party that follows an update."""

    on_progress: "Callable[[UpdateRecord], None]" = lambda _update: None
    """It has come further: a new state, or one more worker."""
    on_end: "Callable[[UpdateRecord, float], None]" = lambda _update, _now: None
    """(update, now): it is committed or aborted; called once."""


@dataclass(slots=True)
class UpdateRecord:
    """One transaction."""

    name: str
    """Prefix of its member commands' ids; unique for ever, so that no member mistakes it for an
    update of an earlier router."""
    body: PublishVersion
    deadline_at: float
    began_at: float
    watcher: Watcher = Watcher()  # noqa: RUF009 - it has no state
    """Nobody for a catch-up: it shows in its worker's version."""
    is_catch_up: bool = False
    """The decision was recorded long ago: bring one worker there."""
    state: UpdateState = "preparing"
    is_decided: bool = False
    """The store was asked to record it and may have done so: there is no way back."""
    bulk: str = ""
    """Where the store was when workers were told to prepare."""
    told: str = ""
    """rid of the command that workers have now, until all are prepared."""
    n_told: int = 0
    targets: list[str] = field(default_factory=list[str])
    absent: dict[str, str] = field(default_factory=dict[str, str])
    """Workers that were expected when it began and were not there -> why."""
    ways: dict[str, Way] = field(default_factory=dict[str, Way])
    """Target -> how it was told to take the version."""
    prepared: dict[str, Prepared] = field(default_factory=dict[str, Prepared])
    left: list[str] = field(default_factory=list[str])
    """Prepared workers whose commit has not begun."""
    stalls_ms: dict[str, float] = field(default_factory=dict[str, float])
    """Of workers that are active."""
    problems: dict[str, str] = field(default_factory=dict[str, str])
    """Worker -> why it is not active."""

    def advance(self, event: str) -> None:
        """Take a step of UPDATE_LIFE; LocalProtocolError if the event has no meaning now."""
        self.state = next_state(UPDATE_LIFE, self.state, event, f"update {self.name}")

    def next_rid(self, step: str) -> str:
        """Of the command that workers get now instead of an earlier one."""
        self.n_told += 1
        self.told = f"{self.name}.{step}{self.n_told}"
        return self.told

    @property
    def prepare_until(self) -> float:
        """When workers that have not prepared are late: those that have are to commit in time."""
        return self.deadline_at - min(COMMIT_S, COMMIT_SHARE * (self.deadline_at - self.began_at))

    @property
    def ready(self) -> list[str]:
        """Targets without a problem so far."""
        return [name for name in self.targets if name not in self.problems]

    @property
    def met_only_silence(self) -> bool:
        """Whether each missing worker was lost, and none refused or failed."""
        return all(problem.startswith(SILENT) for problem in self.problems.values())

    @property
    def satisfies_its_rule(self) -> bool:
        """Whether enough of the expected workers are without a problem."""
        needed = n_needed(self.body.require, len(self.targets) + len(self.absent))
        return needed is not None and len(self.ready) >= needed

    @property
    def progress(self) -> UpdateProgress:
        """The progress that the router reports to the publisher."""
        return UpdateProgress(
            self.body.version,
            self.state,
            len(self.targets),
            n_prepared=len(self.prepared),
            n_active=len(self.stalls_ms),
            update=self.name,
        )

    def status(self, now: float) -> UpdateStatus:
        """What everybody may see."""
        return UpdateStatus(
            self.body.policy,
            self.body.version,
            self.state,
            int((now - self.began_at) * 1000),
            len(self.targets),
            n_prepared=len(self.prepared),
            n_active=len(self.stalls_ms),
            is_catch_up=self.is_catch_up,
        )
