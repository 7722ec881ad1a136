"""What a run showed, as one value: `problems` is empty if it showed what it must."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from tests.drills.chaos.history import Life, Verdict
from tests.drills.chaos.ledger import Ledger
from tests.drills.chaos.recovery import Recovery, Struck, recoveries
from tests.drills.chaos.router_recovery import RouterRecovery, router_recovery
from tests.drills.chaos.settings import ChaosSettings
from tests.drills.chaos.usage import Growth


class Recoveries(msgspec.Struct, frozen=True):
    """How long it took to go on."""

    router: RouterRecovery
    by_fault: dict[str, Recovery]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    seed: int
    seconds: float
    workers: int
    clients: int
    open_requests: int
    faults: dict[str, int]
    requests: int
    ok: int
    moved: int
    """Ended well after more than one attempt."""
    unwanted: int
    """Ended by an abort or a loss that the caller had asked to hear of, or wrongly."""
    behind: int
    """Took any weights, and got some that had been replaced before."""
    excused: int
    """Open when their client was killed."""
    collected: int
    """Detached ones of these that the client's next process has the end of."""
    lost: int
    duplicated: int
    wrong_tokens: int
    stale: int
    poisoned: int
    failed: int
    updates: tuple[int, int]
    """Weight versions offered, and committed as far as a trainer heard."""
    recovery: Recoveries
    usage: dict[str, Growth] = {}
    """By kind of process: the one that grew most."""
    surprises: list[str] = []
    """Deaths that nobody caused."""
    problems: list[str]
    stories: list[str]

    def having(self, usage: Mapping[str, Growth], surprises: Sequence[str]) -> "Report":
        """The same with what was seen of the processes."""
        grown = [f"{kind}: {each.problem}" for kind, each in usage.items() if each.problem]
        return msgspec.structs.replace(
            self,
            usage=dict(usage),
            surprises=list(surprises),
            problems=[*self.problems, *grown, *surprises],
        )


def report(
    settings: ChaosSettings,
    seconds: float,
    verdict: Verdict,
    ledger: Ledger,
    lives: Collection[Life],
    struck: Sequence[Struck],
) -> Report:
    """The report of a run, what its processes held aside."""
    recovery = Recoveries(router_recovery(lives, struck), recoveries(lives, struck))
    return Report(
        seed=settings.seed,
        seconds=round(seconds, 1),
        workers=settings.workers,
        clients=settings.clients,
        open_requests=settings.open_requests,
        faults=dict(sorted(Counter(each.kind for each in struck).items())),
        requests=verdict.n_requests,
        ok=verdict.n_ok,
        moved=verdict.n_moved,
        unwanted=verdict.n_unwanted,
        behind=verdict.n_behind,
        excused=verdict.n_excused,
        collected=verdict.n_collected,
        lost=len(verdict.lost),
        duplicated=len(verdict.duplicated),
        wrong_tokens=len(verdict.wrong_tokens),
        stale=len(verdict.stale),
        poisoned=len(verdict.poisoned),
        failed=len(verdict.failed),
        updates=(ledger.n_offered, ledger.n_committed),
        recovery=recovery,
        problems=_problems(verdict, ledger, recovery),
        stories=verdict.stories,
    )


def _problems(verdict: Verdict, ledger: Ledger, recovery: Recoveries) -> list[str]:
    problems = [f"{verdict.n_violations} requests ended wrongly"] if verdict.n_violations else []
    if ledger.n_offered and not ledger.n_committed:
        problems.append(f"none of {ledger.n_offered} weight versions was committed")
    problems += [
        f"{name}: p99 recovery {each.p99_ms:.0f} ms, bound {each.bound_ms:.0f} ms"
        for name, each in recovery.by_fault.items()
        if not each.is_within_bound
    ]
    new = recovery.router.new
    if new is not None and new.p99_ms > recovery.router.new_bound_ms:
        problems.append(f"new requests waited {new.p99_ms:.0f} ms for a restarted router")
    return problems
