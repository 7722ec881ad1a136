"""What a drill of weight updates showed, as one value: `problems` is empty if it showed nothing."""

from collections.abc import Collection, Sequence

import msgspec

from tests.drills.chaos.history import Life, Verdict
from tests.drills.chaos.records import PublicationOutcome
from tests.drills.weights.settings import WeightDrillSettings

BACK_WITHIN_S = 10.0
"""Promised: from a death until everybody serves again, and one version."""


class CaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """One death."""

    number: int
    name: str
    has_struck: bool
    """The update was where it should be hit."""
    outcome: PublicationOutcome
    """What its trainer heard."""
    by: list[str]
    """Transports by which workers got it after all."""
    why: str
    served_s: float
    """From the death until everybody was there again and the whole fleet served one version."""
    settled_s: float
    """Until the trainer had its answer, too; a broken group is waited for until its timeout."""
    problems: list[str]

    def __str__(self) -> str:
        """One line."""
        missed = "" if self.has_struck else " missed"
        text = f"{self.number:3} {self.name}{missed}: {self.outcome} {','.join(self.by)}"
        return "; ".join([f"{text} {self.served_s} s, {self.settled_s} s", *self.problems])


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    seed: int
    n_cases: int
    n_struck: int
    requests: int
    ok: int
    moved: int
    """Ended well after more than one attempt."""
    crossed: int
    """Ended with tokens of more than one version."""
    lost: int
    duplicated: int
    wrong_tokens: int
    stale: int
    poisoned: int
    failed: int
    served_p50_s: float
    served_max_s: float
    settled_max_s: float
    late: list[str]
    """Cases in which it took longer than promised."""
    cases: list[CaseReport]
    problems: list[str]
    stories: list[str]


def report(
    settings: WeightDrillSettings,
    cases: Sequence[CaseReport],
    verdict: Verdict,
    lives: Collection[Life],
    problems: Sequence[str],
) -> Report:
    """The report of a run."""
    times = sorted(each.served_s for each in cases)
    found = [f"case {each.number}, {each.name}: {text}" for each in cases for text in each.problems]
    if verdict.n_violations:
        found.append(f"{verdict.n_violations} requests ended wrongly")
    return Report(
        seed=settings.seed,
        n_cases=len(cases),
        n_struck=sum(each.has_struck for each in cases),
        requests=verdict.n_requests,
        ok=verdict.n_ok,
        moved=verdict.n_moved,
        crossed=sum(len(end.versions) > 1 for life in lives for end in life.ended),
        lost=len(verdict.lost),
        duplicated=len(verdict.duplicated),
        wrong_tokens=len(verdict.wrong_tokens),
        stale=len(verdict.stale),
        poisoned=len(verdict.poisoned),
        failed=len(verdict.failed),
        served_p50_s=times[len(times) // 2],
        served_max_s=times[-1],
        settled_max_s=max(each.settled_s for each in cases),
        late=[str(each) for each in cases if each.served_s > BACK_WITHIN_S],
        cases=list(cases),
        problems=[*found, *problems],
        stories=verdict.stories,
    )
