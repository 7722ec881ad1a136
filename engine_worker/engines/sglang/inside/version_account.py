"""Versions of tokens, checked by the account that some versions of SGLang keep of their own.

SGLang notes for each request how many tokens it had when the weights changed. That is no version of
a token: what was computed before a change and booked after it counts to the new weights. But it is
found another way than ours, so where the two contradict each other neither can be trusted.
"""

from collections.abc import Callable, Iterable, Sequence

from rolloutbus.engine_worker.engines.sglang.schedulers.wire import VersionsChecked
from rolloutbus.engine_worker.engines.sglang.upstream.types import SchedulerRequest, VersionRun

Counted = Callable[[SchedulerRequest, int], Sequence[VersionRun]]
"""SGLang's account of so many tokens of a request."""


def contradiction(
    reported: Sequence[VersionRun], counted: Sequence[VersionRun], n_late: int
) -> str:
    """Says where reported versions of tokens contradict SGLang's count; empty: nowhere.

    A token is of the version that is counted for it or for one of the `n_late` places before it,
    and of none older than that of the token before. Nothing is counted before a request's first
    token is booked: the first `n_late` tokens may be of any version.

    Args:
        reported: runs without gaps; may begin after 0.
        counted: runs without gaps, from 0 to the end of `reported`. One without a token stands for
            weights that came and went while no token was booked.
        n_late: tokens of a request that can be computed and not booked.
    """
    place = -1
    """In `counted`, of the run that the last token is from; -1: from before the first one."""
    for run in reported:
        token = run.start
        while token < run.stop:
            if place >= 0 or token >= n_late:
                place = _next(run.version, token - n_late, counted, max(place, 0))
            if place == len(counted) or (place >= 0 and counted[place].start > token):
                return _sentence(token, run.version, counted, n_late)
            token = (counted[place].stop if place >= 0 else 0) + n_late
    return ""


def _next(version: str, after: int, counted: Sequence[VersionRun], place: int) -> int:
    """Of the first run, from `place` on, that is of this version and stops after this token."""
    while place < len(counted) and (
        counted[place].version != version or counted[place].stop <= after
    ):
        place += 1
    return place


def _sentence(token: int, version: str, counted: Sequence[VersionRun], n_late: int) -> str:
    near = [run.version for run in counted if run.start <= token and run.stop > token - n_late]
    return (
        f"token {token} was told as of version {version}, and by SGLang's own account it is of "
        f"{' or '.join(near) or 'none'}. No version of this request's tokens can be trusted, so it "
        "fails; compare this SGLang with the tested versions by `rolloutbus doctor`"
    )


class VersionAccount:
    """Compares the versions that were streamed for a request with SGLang's own record."""

    def __init__(
        self, counted: Counted, n_late: int, tell: Callable[[VersionsChecked], None]
    ) -> None:
        """Until a request ends it only takes notes.

        Args:
            counted: SGLang's own account.
            n_late: as of `contradiction`.
            tell: sends a message to the engine host.
        """
        self._counted = counted
        self._n_late = n_late
        self._tell = tell
        self._so_far = VersionsChecked(0, 0)

    def change(self, version: int | None, live: Iterable[SchedulerRequest]) -> None:
        """Note that the tokens of these requests since the last change have `version`."""
        for request in live:
            told: int = getattr(request, "rolloutbus_told", 0)
            noted, start = _noted(request)
            if told > start:
                request.rolloutbus_versions = [*noted, VersionRun(str(version), start, told)]

    def problem_of(self, request: SchedulerRequest, version: int | None, stop: int) -> str:
        """Why versions of a request that ends cannot be trusted; empty: nothing speaks against it.

        Args:
            request: that ends.
            version: of its tokens since the last change.
            stop: how many tokens it has told, with those that are about to be told.
        """
        noted, start = _noted(request)
        told = [*noted, VersionRun(str(version), start, stop)] if stop > start else noted
        if not told:
            return ""
        try:
            problem = contradiction(told, self._counted(request, stop), self._n_late)
        except Exception as error:  # noqa: BLE001 - SGLang would end with it
            problem = f"SGLang's own account of weight versions cannot be read: {error!r}"
        before = self._so_far
        self._so_far = VersionsChecked(
            before.n_requests + 1, before.n_contradicted + (1 if problem else 0)
        )
        self._tell(self._so_far)
        return problem


def _noted(request: SchedulerRequest) -> tuple[Sequence[VersionRun], int]:
    """What is known of a request's versions, and its first token that it is not known of."""
    noted: Sequence[VersionRun] = getattr(request, "rolloutbus_versions", ())
    return noted, noted[-1].stop if noted else 0
