"""What several schedulers are asked is done when the last of them has said so."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from rolloutbus.engine_worker.engine import EngineBusy, EngineDied
from rolloutbus.engine_worker.engines.sglang.engine_thread import EngineThread
from rolloutbus.engine_worker.engines.sglang.schedulers.connection import Schedulers
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    Answered,
    SchedulerAnswer,
    SchedulerRank,
    Unstage,
    VersionStaged,
    order_of,
)

DEADLINE_S = 240.0
RANKS = [SchedulerRank(dp, pp, 0) for dp in range(2) for pp in range(2)]
ORDER = Unstage(7)


class Manager:
    """As SGLang's tokenizer manager: its answer comes from the first schedulers alone."""

    def __init__(self) -> None:
        self.was_asked = threading.Event()
        self.name = ""

    async def get_weights_by_name(self, request: tuple[str, dict[str, str]], _: None) -> None:
        self.name = request[1]["name"]
        self.was_asked.set()

    @property
    def number(self) -> int:
        """Of the order that was sent last."""
        assert self.was_asked.wait(DEADLINE_S)
        found = order_of(self.name)
        assert found is not None
        assert found[1] == ORDER
        return found[0]


class Host:
    """What an engine host has of its schedulers."""

    def __init__(self) -> None:
        self.tokenizer_manager = Manager()
        self.thread = EngineThread(lambda: cast("Any", self), DEADLINE_S)
        self.schedulers = Schedulers(self.thread, RANKS)

    def answered(self, *answers: SchedulerAnswer) -> None:
        number = self.tokenizer_manager.number
        for rank, answer in zip(RANKS, answers, strict=False):
            self.schedulers.on_report(Answered(number, answer), rank)


def named_fields(kind: str, **fields: object) -> object:
    return kind, fields


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    # SGLang is not installed here: its command is nothing but its fields.
    module = "rolloutbus.engine_worker.engines.sglang.schedulers.connection.upstream.request"
    monkeypatch.setattr(module, named_fields)
    host = Host()
    yield host
    host.thread.close(lambda: None)


def test_an_order_is_done_when_all_have_answered(host: Host) -> None:
    answers = [SchedulerAnswer(version=n) for n, _ in enumerate(RANKS)]
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(host.schedulers.ask, ORDER)
        host.answered(*answers[:-1])
        assert not asked.done()
        host.schedulers.on_report(
            Answered(host.tokenizer_manager.number + 1, SchedulerAnswer()), RANKS[-1]
        )
        assert not asked.done()
        host.answered(*answers)
        assert asked.result(DEADLINE_S) == dict(zip(RANKS, answers, strict=True))


@pytest.mark.parametrize("n", range(len(RANKS)))
def test_what_one_cannot_do_is_refused(host: Host, n: int) -> None:
    for answer, kind in (
        (SchedulerAnswer("asleep", is_busy=True), EngineBusy),
        (SchedulerAnswer("no such tensor"), ValueError),
    ):
        host.tokenizer_manager.was_asked.clear()
        answers = [SchedulerAnswer() for _ in RANKS]
        answers[n] = answer
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(host.schedulers.ask, ORDER)
            host.answered(*answers)
            with pytest.raises(kind, match=answer.problem):
                asked.result(DEADLINE_S)


def test_a_version_is_staged_when_all_have_it(host: Host) -> None:
    expected = host.schedulers.expect(VersionStaged, 7)
    for rank in RANKS[:-1]:
        host.schedulers.on_report(VersionStaged(7, ""), rank)
        host.schedulers.on_report(VersionStaged(6, ""), RANKS[-1])
        host.schedulers.on_report(VersionStaged(7, ""), rank)
    assert not expected.done()
    host.schedulers.on_report(VersionStaged(7, "no room"), RANKS[-1])
    reports = host.schedulers.wait(expected, is_patient=False)
    assert reports[RANKS[-1]] == VersionStaged(7, "no room")


def test_who_waits_for_a_dead_engine_hears_of_it(host: Host) -> None:
    expected = host.schedulers.expect(VersionStaged, 7)
    host.schedulers.on_report(VersionStaged(7, ""), RANKS[0])
    host.thread.die("out of memory")
    with pytest.raises(EngineDied, match="out of memory"):
        host.schedulers.wait(expected, is_patient=True)
