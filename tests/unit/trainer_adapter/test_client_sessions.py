"""Sessions of a client: held while they are open, opened again on a fresh link, moved."""

import random

import pytest

from rolloutbus.bus.wire.errors import BusError, DeadlineExceeded, MailboxFull
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.bus.wire.messages.generation import (
    CloseSession,
    OpenedSession,
    OpenSession,
    SessionMoved,
)
from rolloutbus.bus.wire.messages.membership import Dismissed
from rolloutbus.trainer_adapter.client.core.core import ClientCore
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.unit.trainer_adapter.bench import BOOT, Bench, problem


def opened(bench: Bench, name: str = "agent", worker: str = "w0") -> str:
    rid = bench.command("open_session", OpenSession(name, lease_s=20.0))
    bench.say("finished", OpenedSession(worker), rid=rid)
    bench.take("open_session")
    return rid


def relinked(bench: Bench) -> None:
    """The router restarts, and welcomes the client again."""
    bench.say("dismissed", Dismissed("unknown-peer", "say hello"))
    bench.welcome(epoch=2, instance="r2")


def test_an_opened_session_is_held_where_the_router_says(bench: Bench) -> None:
    opened(bench)
    held = bench.core.sessions["agent"]
    assert (held.worker, held.n_moved, held.last_move) == ("w0", 0, None)


def test_held_sessions_are_opened_again_before_requests_are_sent_again(bench: Bench) -> None:
    opened(bench)
    rid = bench.generate()
    bench.sent.clear()
    relinked(bench)
    kinds = [entry.kind for entry in bench.sent if entry.kind in ("open_session", "generate")]
    assert kinds == ["open_session", "generate"]
    (body,) = bench.bodies("open_session", OpenSession)
    assert (body.session, body.worker, body.lease_s) == ("agent", "w0", 20.0)
    assert [entry.rid for entry in bench.take("generate")] == [rid]


def test_a_closed_session_is_not_opened_again(bench: Bench) -> None:
    opened(bench)
    rid = bench.command("close_session", CloseSession("agent"))
    bench.say("finished", Done(), rid=rid)
    assert bench.core.sessions == {}
    relinked(bench)
    assert bench.take("open_session") == []


def test_a_session_that_was_closed_in_vain_is_not_opened_again(bench: Bench) -> None:
    opened(bench)
    rid = bench.command("close_session", CloseSession("agent"), deadline_s=2.0)
    bench.pass_time(4.0)
    assert isinstance(bench.outcomes[rid], DeadlineExceeded)
    assert bench.core.sessions == {}
    relinked(bench)
    assert bench.take("open_session") == []


def test_a_session_that_was_closed_while_it_was_opened_again_stays_closed(bench: Bench) -> None:
    opened(bench)
    rid = bench.command("close_session", CloseSession("agent"), deadline_s=2.0)
    relinked(bench)
    (reopened,) = bench.take("open_session")
    bench.pass_time(4.0)
    assert isinstance(bench.outcomes[rid], DeadlineExceeded)
    bench.say("finished", OpenedSession("w1"), rid=reopened.rid)
    assert bench.core.sessions == {}


def test_a_session_whose_close_finds_no_room_is_not_opened_again(bench: Bench) -> None:
    settings = ClientSettings(name="c", router="ipc:///nowhere", max_open=1)
    bench.core = ClientCore(settings, BOOT, random.Random(0))
    bench.apply(bench.core.start(bench.clock.now()))
    bench.welcome()
    opened(bench)
    bench.generate()
    with pytest.raises(MailboxFull):
        bench.command("close_session", CloseSession("agent"))
    assert bench.core.sessions == {}


def test_to_close_a_session_that_the_router_forgot_forgets_it_here(bench: Bench) -> None:
    opened(bench)
    rid = bench.command("close_session", CloseSession("agent"))
    bench.refuse(rid, problem("unknown_session"))
    assert bench.core.sessions == {}
    assert isinstance(bench.outcomes[rid], BusError)


def test_a_refused_session_is_not_held(bench: Bench) -> None:
    rid = bench.command("open_session", OpenSession("agent"))
    bench.refuse(rid, problem("busy", 1000))
    assert bench.core.sessions == {}
    assert isinstance(bench.outcomes[rid], BusError)


def test_a_move_is_noted_and_counted(bench: Bench) -> None:
    opened(bench)
    move = SessionMoved("agent", "w0", "w1", "lost")
    bench.say("session_moved", move)
    held = bench.core.sessions["agent"]
    assert (held.worker, held.n_moved, held.last_move) == ("w1", 1, move)
    assert bench.core.counters.sessions_moved == 1
    opened(bench, worker="w1")
    assert bench.core.sessions["agent"].n_moved == 1


def test_a_move_that_was_told_while_the_client_was_away_is_found_out_on_return(
    bench: Bench,
) -> None:
    opened(bench)
    relinked(bench)
    (entry,) = bench.take("open_session")
    bench.say("finished", OpenedSession("w2"), rid=entry.rid)
    held = bench.core.sessions["agent"]
    assert (held.worker, held.n_moved) == ("w2", 1)
    assert held.last_move == SessionMoved("agent", "w0", "w2", "unseen")
    assert entry.rid not in bench.outcomes


def test_a_session_whose_place_is_gone_on_return_is_lost(bench: Bench) -> None:
    opened(bench)
    relinked(bench)
    (entry,) = bench.take("open_session")
    bench.refuse(entry.rid, problem("busy"))
    assert bench.core.sessions == {}
    assert bench.core.counters.sessions_lost == 1


def test_a_move_of_a_session_that_is_not_held_changes_nothing(bench: Bench) -> None:
    bench.say("session_moved", SessionMoved("other", "w0", "w1", "lost"))
    assert bench.core.sessions == {}
    assert bench.core.counters.malformed_in == bench.core.counters.unexpected_in == 0
