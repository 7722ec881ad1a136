"""A report names everything that is not as it must be, and people can read it."""

import io

import msgspec
import pytest

from tests.drills.chaos.__main__ import show_report
from tests.drills.chaos.history import judge, lives_of
from tests.drills.chaos.ledger import Ledger
from tests.drills.chaos.records import Ended, Invoked, Progressed, Record
from tests.drills.chaos.recovery import Struck
from tests.drills.chaos.report import Report, report
from tests.drills.chaos.settings import ChaosSettings
from tests.drills.chaos.usage import Growth, Usage

ASKED = Invoked("c0:0.1:1", 1.0, b"", seed=3, n_tokens=0, allowed=[], is_streamed=True)
STRUCK = [
    Struck("kill_worker", "w0", 10.0, 10.0),
    Struck("kill_router", "router", 30.0, 31.0),
]


def _report(*records: Record) -> Report:
    lives = lives_of(records)
    verdict = judge(lives)
    return report(ChaosSettings(seed=1), 60.0, verdict, Ledger(), lives.values(), STRUCK)


def test_run_without_fault_of_ours_has_no_problems() -> None:
    moves = [Progressed(ASKED.op, 9.0, "w0", 0), Progressed(ASKED.op, 13.0, "w1", 0)]
    found = _report(ASKED, *moves, Ended(ASKED.op, 31.5, "ok", rid="c0/1", worker="w1"))
    found = found.having({"router": Growth(Usage(9, 40.0), Usage(9, 41.0))}, [])
    assert found.problems == []
    assert set(found.recovery.by_fault) == {"kill_worker", "kill_router"}
    assert found.recovery.router.kills == 1


def test_each_thing_that_is_wrong_is_a_problem_of_its_own() -> None:
    found = _report(ASKED, Progressed(ASKED.op, 9.0, "w0", 0))
    found = found.having({"router": Growth(Usage(9, 40.0), Usage(99, 40.0))}, ["w1 has left"])
    text = "; ".join(found.problems)
    assert found.lost == 1
    assert "1 requests ended wrongly" in text
    assert "kill_worker: p99 recovery 20000 ms, bound 5000 ms" in text
    assert "kill_router: p99 recovery" in text
    assert "router: fds grew from 9 to 99" in text
    assert "w1 has left" in text


def test_report_is_json_and_a_page_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _report(ASKED, Progressed(ASKED.op, 9.0, "w0", 0))
    found = found.having({"router": Growth(Usage(9, 40.0), Usage(9, 41.0))}, [])
    assert msgspec.json.decode(msgspec.json.encode(found), type=Report) == found
    monkeypatch.setenv("COLUMNS", "160")
    page = io.StringIO()
    show_report(msgspec.to_builtins(found), page)
    for words in ("kill_worker", "restart", "router: 9 -> 9 fds", "no outcome", "ended wrongly"):
        assert words in page.getvalue()
