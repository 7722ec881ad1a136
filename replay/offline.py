"""Rollouts of the past in place of a live fleet: for training from a journal or from its export.

They come with the logprobs and the weight versions of their sampling, so that importance ratios
and staleness mean what they meant then.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import cast

from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.messages.generation import FinishReason
from rolloutbus.replay.journal.format import JournalError
from rolloutbus.replay.journal.reader import Journal
from rolloutbus.replay.trajectories import NO_TAP, Ints, Trajectories, Trajectory
from rolloutbus.replay.trajectory_files import JSONL, PARQUET, read
from rolloutbus.trainer_adapter.client.core.results import Rollout


@dataclass(frozen=True, slots=True)
class OfflineRollout:
    """One finished rollout, and what it answers."""

    prompt: Ints
    """int32 [n_prompt_tokens]."""
    rollout: Rollout
    """As its client got it; `arrays` are not kept."""
    group: str
    """Of the samples of one prompt; empty: none was named."""
    session: str
    """Empty: it belonged to none."""
    policy: str
    ended_at: float
    """Unix time, seconds, when its client was told."""

    @property
    def oldest_version(self) -> int:
        """Of the weights that sampled any of its tokens; 0 if there are none."""
        return min((version for version, _ in self.rollout.version_runs), default=0)


@strict()
class OfflineRollouts:
    """Rollouts of a recording; each iteration reads them again, so memory holds none.

    for group in rolloutbus.OfflineRollouts("trajectories.parquet").groups(8):
        train_on([each.rollout for each in group])
    """

    def __init__(
        self,
        path: str | Path,
        *,
        policy: str = "",
        min_version: int = 0,
        allow_gaps: bool = False,
    ) -> None:
        """Choose what to train on.

        Args:
            path: a journal's directory, or a file that `rolloutbus export` has written.
            policy: leave out what other policies sampled; empty: take all.
            min_version: leave out what older weights had a part in.
            allow_gaps: take a journal that is not whole as it is, and go on behind damage.

        Raises:
            SettingsError: nothing of the kind is there.
            JournalError: the directory holds no journal.
        """
        self._path = Path(path)
        self._policy = policy
        self._min_version = min_version
        self._allow_gaps = allow_gaps
        if self._path.is_dir():
            Journal(self._path)
        elif self._path.suffix not in (JSONL, PARQUET):
            raise SettingsError(f"{path}: neither a journal's directory nor {JSONL} nor {PARQUET}")
        elif not self._path.exists():
            raise SettingsError(f"{path}: there is no such file")

    def __iter__(self) -> Iterator[OfflineRollout]:
        """In the order in which they ended.

        Raises:
            JournalError: this is no journal, or it is not whole: at the damage, or after the last
                rollout that is there; or it was recorded without a router's tap.
            msgspec.DecodeError: the file holds something else.
        """
        for trajectory in self._trajectories():
            found = _offline(trajectory)
            if self._policy in ("", found.policy) and found.oldest_version >= self._min_version:
                yield found

    def groups(self, size: int) -> Iterator[list[OfflineRollout]]:
        """Rollouts of one group's name, `size` at a time, as soon as so many have ended.

        What has no group, and what is left of groups in the end, is not among them.
        """
        waiting: defaultdict[str, list[OfflineRollout]] = defaultdict(list)
        for found in self:
            if not found.group:
                continue
            group = waiting[found.group]
            group.append(found)
            if len(group) == size:
                yield waiting.pop(found.group)

    def shuffled_groups(self, size: int, seed: int) -> list[list[OfflineRollout]]:
        """The same in another order, all in memory; the same seed gives the same order."""
        groups = list(self.groups(size))
        Random(seed).shuffle(groups)  # noqa: S311 - an order, not a secret
        return groups

    def _trajectories(self) -> Iterator[Trajectory]:
        if not self._path.is_dir():
            yield from read(self._path)
            return
        journal = Journal(self._path, skip=self._allow_gaps)
        found = Trajectories(journal)
        yield from found
        # Results hold all their tokens: nothing of a rollout comes from streams.
        gaps = [each.sentence for each in journal.gaps if each.kind != "lost_stream"]
        if gaps and not self._allow_gaps:
            raise JournalError(
                f"{self._path} is not whole: {'; '.join(gaps)}; allow_gaps=True takes it as it is"
            )
        if found.requests.lacks_tap and not self._allow_gaps:
            raise JournalError(f"{self._path} {NO_TAP}")


def _offline(row: Trajectory) -> OfflineRollout:
    rollout = Rollout(
        rid=row.rid,
        tokens=row.output_ids,
        logprobs=row.logprobs,
        behaviour_logprobs=row.behaviour_logprobs,
        version_runs=list(zip(row.run_versions, row.run_lengths, strict=True)),
        finish_reason=cast("FinishReason", row.finish_reason),
        worker=row.worker,
        n_prompt_tokens=len(row.prompt_ids),
        n_attempts=row.n_attempts,
        n_resumed=row.n_resumed,
        queue_ms=row.queue_ms,
        run_ms=row.run_ms,
    )
    return OfflineRollout(row.prompt_ids, rollout, row.group, row.session, row.policy, row.ended_at)
