"""The judge must be able to say no: histories with one thing wrong each."""

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from tests.drills.chaos.history import Verdict, fake_oracle, judge, lives_of
from tests.drills.chaos.ledger import Ledger
from tests.drills.chaos.records import Ended, Invoked, Offered, Outcome, Progressed, Record, Settled

N_TOKENS = 6


def _request(op: str = "c0:0:1", *, allowed: list[Outcome] | None = None) -> Invoked:
    prompt = np.array([5, 6, 7], "<i4").tobytes()
    return Invoked(op, 10.0, prompt, seed=3, n_tokens=N_TOKENS, allowed=allowed or [])


def _ok(request: Invoked, rid: str = "c0/1") -> Ended:
    tokens = np.array(fake_oracle(request, [0] * N_TOKENS), "<i4").tobytes()
    return Ended(request.op, 12.0, "ok", rid=rid, tokens=tokens, versions=[(0, N_TOKENS)])


def _judge(*records: Record) -> Verdict:
    return judge(lives_of(records))


@dataclass
class Case:
    records: list[Record]
    wrong: str
    why: str = field(default="")


def _with(ended: Ended, **changes: object) -> Ended:
    return msgspec.structs.replace(ended, **changes)


ASKED = _request()
OTHER = _request("c0:0:2")
WANTS_LATEST = msgspec.structs.replace(ASKED, wants_latest=True)
GOOD = _ok(ASKED)
SWAPPED = GOOD.tokens[4:8] + GOOD.tokens[:4] + GOOD.tokens[8:]

CASES = {
    "no outcome": Case([ASKED], "lost", "no outcome"),
    "too late": Case([ASKED, Ended(ASKED.op, 99.0, "expired")], "lost", "expired"),
    "worker loss not asked for": Case([ASKED, Ended(ASKED.op, 11.0, "lost")], "lost"),
    "two outcomes": Case([ASKED, GOOD, _with(GOOD, at=13.0)], "duplicated", "2 outcomes"),
    "another's outcome": Case([ASKED, GOOD, OTHER, _ok(OTHER, GOOD.rid)], "duplicated", "c0/1"),
    "asked twice": Case([ASKED, ASKED, GOOD], "duplicated", "asked 2 times"),
    "tokens after the end": Case(
        [ASKED, GOOD, Progressed(ASKED.op, 12.5, "w0", 3)], "duplicated", "after the outcome"
    ),
    "token missing": Case(
        [ASKED, _with(GOOD, tokens=GOOD.tokens[:-4])], "wrong_tokens", "5 tokens"
    ),
    "tokens swapped": Case([ASKED, _with(GOOD, tokens=SWAPPED)], "wrong_tokens", "token 0 is"),
    "wrong version": Case(
        [ASKED, _with(GOOD, versions=[(9, N_TOKENS)])], "wrong_tokens", "never were: [9]"
    ),
    "versions too short": Case([ASKED, _with(GOOD, versions=[(0, 2)])], "wrong_tokens"),
    "stream differs": Case([ASKED, _with(GOOD, streamed=SWAPPED)], "wrong_tokens", "streamed"),
    "stream with a gap": Case(
        [ASKED, _with(GOOD, streamed=GOOD.tokens, n_gaps=1)], "wrong_tokens", "left tokens out"
    ),
    "partial is wrong": Case(
        [
            _request(allowed=["cancelled"]),
            _with(GOOD, outcome="cancelled", tokens=SWAPPED[:12], versions=[(0, 3)]),
        ],
        "wrong_tokens",
    ),
    "cancelled by nobody": Case(
        [ASKED, _with(GOOD, outcome="cancelled", tokens=b"", versions=[])], "failed"
    ),
    "innocent blamed": Case(
        [ASKED, Ended(ASKED.op, 11.0, "failed", code="engine_crashed")], "poisoned"
    ),
    "engine failed": Case([ASKED, Ended(ASKED.op, 11.0, "failed", code="engine_failed")], "failed"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_judge_finds_what_is_wrong_and_tells_its_story(case: Case) -> None:
    verdict = _judge(*case.records)
    lists = ("lost", "duplicated", "wrong_tokens", "poisoned", "failed")
    assert [name for name in lists if getattr(verdict, name)] == [case.wrong]
    assert verdict.n_violations == 1
    assert case.why in verdict.stories[0]
    assert "asked for 6 tokens" in verdict.stories[0]


def test_good_history_passes() -> None:
    verdict = _judge(ASKED, GOOD, OTHER, _ok(OTHER, "c0/2"))
    assert (verdict.n_requests, verdict.n_ok, verdict.n_violations) == (2, 2, 0)
    assert verdict.stories == []


def test_outcomes_that_were_asked_for_are_no_violation() -> None:
    partial = _with(GOOD, outcome="cancelled", tokens=GOOD.tokens[:8], versions=[(0, 2)])
    assert _judge(_request(allowed=["cancelled"]), partial).n_violations == 0
    assert _judge(_request(allowed=["lost"]), Ended(ASKED.op, 11.0, "lost")).n_violations == 0


def test_tokens_of_two_versions_are_right_when_both_were_published() -> None:
    versions = [0, 0, 4, 4, 4, 4]
    tokens = np.array(fake_oracle(ASKED, versions), "<i4").tobytes()
    mixed = _with(GOOD, tokens=tokens, versions=[(0, 2), (4, 4)])
    assert judge(lives_of([ASKED, mixed]), ledger=Ledger([Offered(4, 9.0)])).n_violations == 0
    assert judge(lives_of([ASKED, mixed])).wrong_tokens == [ASKED.op]
    refuted = Ledger([Offered(4, 9.0), Settled(4, 9.5, "refuted")])
    assert judge(lives_of([ASKED, mixed]), ledger=refuted).wrong_tokens == [ASKED.op]


def _sampled_with(*versions: int) -> Ended:
    tokens = np.array(fake_oracle(ASKED, list(versions)), "<i4").tobytes()
    return _with(GOOD, tokens=tokens, versions=[(version, 1) for version in versions])


def test_weights_that_were_replaced_before_the_request_was_asked_are_stale() -> None:
    records = [Offered(4, 1.0), Settled(4, 9.9, "committed")]
    old = _sampled_with(0, 0, 0, 4, 4, 4)
    verdict = judge(lives_of([WANTS_LATEST, old]), ledger=Ledger(records))
    assert verdict.stale == [ASKED.op]
    assert "version 0 after 4 was committed" in verdict.stories[0]
    later = [Offered(4, 1.0), Settled(4, 10.1, "committed")]
    assert judge(lives_of([WANTS_LATEST, old]), ledger=Ledger(later)).n_violations == 0


def test_who_takes_any_weights_takes_replaced_ones_too() -> None:
    records = [Offered(4, 1.0), Settled(4, 9.9, "committed")]
    verdict = judge(lives_of([ASKED, _sampled_with(0, 0, 0, 4, 4, 4)]), ledger=Ledger(records))
    assert (verdict.n_behind, verdict.n_violations) == (1, 0)


def test_older_weights_after_newer_ones_are_stale() -> None:
    back = _sampled_with(4, 4, 0, 0, 0, 0)
    verdict = judge(lives_of([WANTS_LATEST, back]), ledger=Ledger([Offered(4, 9.0)]))
    assert verdict.stale == [ASKED.op]


def test_request_of_a_killed_client_needs_no_outcome_but_a_right_one() -> None:
    verdict = judge(lives_of([ASKED], is_excused=True))
    assert (verdict.n_excused, verdict.n_violations) == (1, 0)
    wrong = _with(GOOD, tokens=SWAPPED)
    assert judge(lives_of([ASKED, wrong], is_excused=True)).wrong_tokens == [ASKED.op]


DETACHED = msgspec.structs.replace(ASKED, is_detached=True)
COLLECTED = _with(GOOD, at=20.0, is_collected=True)
GONE = Ended(ASKED.op, 20.0, "failed", code="worker_lost", is_collected=True)


def _inherited(*records: Record, owed: bool = True) -> Verdict:
    """The verdict on what a killed client asked for and its successor found."""
    lives = lives_of([DETACHED], is_excused=True)
    for op, life in lives_of(records).items():
        lives[op].join(life)
    for life in lives.values():
        life.is_owed = owed
    return judge(lives)


def test_end_that_a_successor_collects_is_the_request_s_own() -> None:
    verdict = _inherited(COLLECTED)
    assert (verdict.n_collected, verdict.n_violations) == (1, 0)
    assert _inherited(_with(COLLECTED, tokens=SWAPPED)).wrong_tokens == [ASKED.op]


def test_end_that_was_not_acknowledged_is_collected_again_but_not_another_one() -> None:
    assert _inherited(COLLECTED, COLLECTED).n_violations == 0
    other = _with(COLLECTED, tokens=SWAPPED)
    assert ASKED.op in _inherited(COLLECTED, other).duplicated


def test_detached_request_that_an_update_stopped_may_end_so_for_who_collects_it() -> None:
    stopped = _with(GOOD, outcome="cancelled", tokens=b"", versions=[])
    assert _inherited(msgspec.structs.replace(stopped, is_collected=True)).n_violations == 0
    assert _judge(ASKED, stopped).failed == [ASKED.op]


def test_detached_request_may_be_lost_only_with_those_who_held_it() -> None:
    assert _inherited().lost == [ASKED.op]
    assert _inherited(GONE).lost == [ASKED.op]
    assert _inherited(GONE, owed=False).n_violations == 0


def test_nobody_collects_what_a_living_client_waits_for() -> None:
    assert _judge(DETACHED, GOOD, COLLECTED).duplicated == [ASKED.op]
