"""Versions that contradict SGLang's own account fail their request; late ones do not."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutbus.engine_worker.engines.sglang.inside.tap_columns import TapColumns
from rolloutbus.engine_worker.engines.sglang.inside.version_account import (
    VersionAccount,
    contradiction,
)
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    STREAMED,
    Rows,
    VersionsChecked,
)
from rolloutbus.engine_worker.engines.sglang.upstream.types import VersionRun

Lengths = list[tuple[str, int]]
"""Versions, and how many tokens are of each."""
LENGTHS = st.lists(st.tuples(st.sampled_from("0123"), st.integers(0, 3)), max_size=8)


def runs_of(lengths: Lengths, start: int = 0) -> list[VersionRun]:
    runs: list[VersionRun] = []
    for version, n in lengths:
        runs.append(VersionRun(version, start, start + n))
        start += n
    return runs


def is_explained(told: Sequence[VersionRun], counted: Sequence[VersionRun], n_late: int) -> bool:
    """By trying for each token every run of `counted` that it may be from."""
    reached = {-1}
    for run in told:
        for token in range(run.start, run.stop):
            first = min(reached, default=len(counted))
            from_before = {-1} if first < 0 and token < n_late else set[int]()
            reached = from_before | {
                place
                for place, other in enumerate(counted)
                if place >= first
                and other.version == run.version
                and other.start <= token < other.stop + n_late
            }
    return bool(reached)


@given(LENGTHS, LENGTHS, st.integers(0, 4), st.integers(0, 3))
def test_it_finds_what_no_delay_explains(
    told: Lengths, counted: Lengths, start: int, n_late: int
) -> None:
    of_told, of_counted = runs_of(told, start), runs_of(counted)
    found = contradiction(of_told, of_counted, n_late)
    assert bool(found) != is_explained(of_told, of_counted, n_late)


class Decoding:
    """One request in a scheduler, and what SGLang and we make of it."""

    def __init__(self, *, is_overlapped: bool) -> None:
        self._depth = int(is_overlapped)
        self.version = 0
        self.stamp: int | None = None
        """What steps say that they were launched with; None: the truth."""
        self._launched: list[int] = []
        self._events: list[tuple[str, int]] = []
        self.request: Any = SimpleNamespace(
            rid=f"{STREAMED}1",
            output_ids=[],
            finished_reason=None,
            finished_len=None,
            finished_output=None,
            logprob=SimpleNamespace(output_token_logprobs_val=[]),
            sampling_params=SimpleNamespace(custom_params=None, top_k=1, top_p=1.0, min_p=0.0),
        )
        self.told: list[tuple[int, int | None]] = []
        """(token, version) of each that left."""
        self.heard: list[VersionsChecked] = []
        self.ends: list[str] = []
        self.columns = TapColumns(4)
        self.columns.account = VersionAccount(self.counted, 1, self.heard.append)

    def change(self) -> None:
        """New weights, between two steps."""
        if self.request.output_ids:
            self._events.append((str(self.version), len(self.request.output_ids)))
        self.version += 1

    def step(self) -> None:
        """One more is launched; what was before it is booked."""
        self._launched.append(self.version if self.stamp is None else self.stamp)
        while len(self._launched) > self._depth:
            self._book()

    def finish(self) -> None:
        """What was launched is booked; the last of it ends the request."""
        self._launched = self._launched or [self.version if self.stamp is None else self.stamp]
        while self._launched:
            self._book(is_last=len(self._launched) == 1)

    def counted(self, request: object, n_tokens: int) -> list[VersionRun]:
        """What SGLang would say."""
        del request
        stops = [n for _, n in self._events]
        versions = [version for version, _ in self._events]
        columns = [*versions, str(self.version)], [0, *stops], [*stops, n_tokens]
        return [VersionRun(*run) for run in zip(*columns, strict=True)]

    def _book(self, *, is_last: bool = False) -> None:
        self._hear(self.columns.change_version(self._launched.pop(0), [self.request]))
        self.request.output_ids.append(len(self.request.output_ids))
        if is_last:
            self.request.finished_reason = SimpleNamespace(to_json=lambda: {"type": "length"})
        self._hear(self.columns.step([self.request]))

    def _hear(self, rows: Rows | None) -> None:
        if rows is not None:
            tokens = memoryview(rows.tokens).cast("i").tolist()
            self.told += [(token, rows.version) for token in tokens]
            self.ends += [f"{finish.status} {finish.message}" for finish in rows.finishes]


TURNS = st.lists(st.sampled_from(["step", "step", "change"]), max_size=40)


@given(TURNS, st.booleans())
def test_true_versions_pass_whenever_weights_change(turns: list[str], is_overlapped: bool) -> None:
    decoding = Decoding(is_overlapped=is_overlapped)
    for turn in turns:
        getattr(decoding, turn)()
    decoding.finish()
    assert decoding.ends == ["0 "]
    assert [token for token, _ in decoding.told] == decoding.request.output_ids
    assert decoding.heard == [VersionsChecked(1, 0)]


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_version_that_stays_behind_fails_its_request_and_no_more_of_it_is_told(
    *, is_overlapped: bool
) -> None:
    decoding = Decoding(is_overlapped=is_overlapped)
    decoding.step()
    decoding.step()
    decoding.change()
    decoding.stamp = 0
    decoding.step()
    decoding.step()
    n_told = len(decoding.told)
    decoding.finish()
    (end,) = decoding.ends
    # With overlapped scheduling one token fewer was booked when the weights changed.
    token = 2 if is_overlapped else 3
    for said in (f"500 token {token} was told as of version 0", "is of 1", "rolloutbus doctor"):
        assert said in end
    assert n_told <= len(decoding.told) < len(decoding.request.output_ids)
    assert decoding.heard == [VersionsChecked(1, 1)]


def test_an_account_that_cannot_be_read_fails_the_request() -> None:
    def counted(*_: object) -> Sequence[VersionRun]:
        raise AttributeError("version")

    decoding = Decoding(is_overlapped=False)
    decoding.columns.account = VersionAccount(counted, 1, decoding.heard.append)
    decoding.finish()
    (end,) = decoding.ends
    assert "cannot be read: AttributeError('version')" in end
    assert decoding.told == []
    assert decoding.heard == [VersionsChecked(1, 1)]


def test_requests_that_are_aborted_are_checked_too() -> None:
    decoding = Decoding(is_overlapped=False)
    for _ in range(3):
        decoding.step()
    decoding.change()
    rows = decoding.columns.end([decoding.request])
    assert rows is not None
    assert [finish.status for finish in rows.finishes] == [0]
    assert decoding.heard == [VersionsChecked(1, 0)]


def test_a_request_without_tokens_has_nothing_to_check() -> None:
    decoding = Decoding(is_overlapped=False)
    decoding.columns.end([decoding.request])
    assert decoding.heard == []
