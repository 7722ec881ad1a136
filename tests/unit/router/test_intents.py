"""A pause is an intent: the router keeps it, and whoever joins is held to it before it serves."""

from typing import cast

import pytest

from rolloutbus.bus.wire.codec import pack, unpack, unpack_as, unpack_result
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.control import FleetStatus, Pause, Resume, Score
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.bus.wire.messages.membership import Dismissed, Heartbeat, Intent, Members
from rolloutbus.router.members.intents import NAMELESS_S
from tests.unit.router.harness import INSTANCE, Bus, SimClient, SimWorker

ABLE = ["generate", "pause", "resume", "score"]
STARTED = Intent((3, 7), "fleet-x")
PAUSED = Intent((3, 8), "fleet-x", "in_place")


def told(client: SimClient, kind: str, *workers: SimWorker, route: str = "fleet") -> None:
    """A client pauses or resumes, and the workers do it."""
    client.ask(kind, Pause("in_place") if kind == "pause" else Resume(), route)
    for worker in workers:
        worker.end(worker.heard_one(kind), body=Done())
        worker.state = "paused" if kind == "pause" else "ready"
        worker.heartbeat()
    assert client.ending()[0] == "finished"


def intent_of(worker: SimWorker) -> Intent:
    """What it was told last."""
    intent = unpack(worker.take("intent")[-1])
    assert isinstance(intent, Intent)
    return intent


def status_of(client: SimClient) -> FleetStatus:
    client.ask("status")
    (entry,) = client.take("finished")
    status = unpack_result("status", entry)
    assert isinstance(status, FleetStatus)
    return status


def test_a_worker_that_comes_back_stays_paused_until_resume() -> None:
    bus = Bus()
    client, before = bus.client(), bus.worker(abilities=ABLE)
    told(client, "pause", before)
    rid = client.generate(deadline_s=60)
    before.is_alive = False
    again = bus.worker(abilities=ABLE)
    bus.advance(5)
    assert again.take("generate") == []
    assert unpack(again.heard_one("pause")) == Pause("in_place")
    assert [worker.state for worker in status_of(client).workers] == ["paused"]
    told(client, "resume", again)
    assert again.heard_one("generate").rid == rid


def test_a_worker_that_joins_late_is_paused_before_it_serves() -> None:
    bus = Bus()
    client, first = bus.client(), bus.worker("w0", abilities=ABLE)
    told(client, "pause", first)
    late = bus.worker("w1", abilities=ABLE)
    client.generate(deadline_s=60)
    bus.advance(3)
    assert (first.take("generate"), late.take("generate")) == ([], [])
    assert intent_of(late).pause == "in_place"


def test_a_pause_without_any_worker_holds_who_comes() -> None:
    bus = Bus()
    client = bus.client()
    told(client, "pause")
    worker = bus.worker(abilities=["generate"])  # it could not even pause
    client.generate(deadline_s=60)
    bus.advance(3)
    assert worker.take("generate") == []
    told(client, "resume", worker)
    assert worker.take("generate")


def test_a_pause_of_one_worker_is_its_own() -> None:
    bus = Bus()
    client = bus.client()
    w0, w1 = (bus.worker(name, abilities=ABLE) for name in ("w0", "w1"))
    told(client, "pause", w0, route="worker:w0")
    w0.is_alive = False
    again = bus.worker("w0", abilities=ABLE)
    for _ in range(4):
        client.generate()
    bus.advance(1)
    assert len({entry.rid for entry in w1.take("generate")}) == 4
    assert again.take("generate") == []
    assert (status_of(client).pause, status_of(client).paused) == ("", {"w0": "in_place"})
    told(client, "resume", again, w1)
    assert status_of(client).paused == {}


def test_one_worker_may_go_on_while_the_fleet_is_paused() -> None:
    bus = Bus()
    client = bus.client()
    w0, w1 = (bus.worker(name, abilities=ABLE) for name in ("w0", "w1"))
    told(client, "pause", w0, w1)
    told(client, "resume", w0, route="worker:w0")
    client.generate()
    assert (len(w0.take("generate")), w1.take("generate")) == (1, [])
    assert (status_of(client).pause, status_of(client).paused) == ("in_place", {"w0": ""})


def test_a_worker_that_missed_the_resume_is_resumed() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker(abilities=ABLE)
    told(client, "pause", worker)
    client.ask("resume", Resume(), "fleet", deadline_s=1)
    worker.take("resume")  # it is cut off from what it is told
    bus.advance(6)
    assert client.ending()[0] == "finished"
    worker.end(worker.heard_one("resume"), body=Done())


def test_texts_are_not_scored_by_a_worker_that_is_to_be_paused() -> None:
    bus = Bus()
    client = bus.client()
    told(client, "pause")
    worker = bus.worker(abilities=ABLE)
    client.ask("score", Score(b"", [b"\1\0\0\0"], [1]), "worker:w0")
    assert client.ending() == ("refused", "not_ready")
    assert worker.take("score") == []


@pytest.mark.parametrize("witness", ["worker", "store"])
def test_a_new_router_learns_of_the_pause_before_a_new_worker_serves(witness: str) -> None:
    bus = Bus(recovered=False)
    fresh = SimWorker(bus, "w1", 4, 0, {"abilities": ABLE}, None)
    client = bus.client()
    client.generate(deadline_s=60)
    assert fresh.take("generate") == []
    if witness == "worker":
        bus.worker("w0", intent=PAUSED, abilities=ABLE).state = "paused"
    else:
        bus.store(intent=PAUSED)
    bus.advance(8)
    assert fresh.take("generate") == []
    assert fresh.heard_one("pause")
    assert (status_of(client).pause, status_of(client).fleet) == ("in_place", "fleet-x")


def test_the_latest_of_what_members_were_told_counts() -> None:
    bus = Bus(recovered=False)
    paused = bus.worker("w0", intent=PAUSED, abilities=ABLE)
    resumed = bus.worker("w1", intent=Intent((3, 9), "fleet-x"), abilities=ABLE)
    before = bus.worker("w2", intent=STARTED, abilities=ABLE)
    bus.client().generate()
    bus.advance(1)
    assert any(worker.take("generate") for worker in (paused, resumed, before))
    assert intent_of(resumed).stamp == (3, 9)


def test_a_router_that_begins_a_fleet_lets_workers_serve_soon() -> None:
    bus = Bus(recovered=False)
    fresh = SimWorker(bus, "w0", 4, 0, {"abilities": ABLE}, None)
    bus.client().generate()
    bus.advance(2)
    assert fresh.take("generate")


def test_a_pause_waits_until_the_new_router_knows_of_earlier_ones() -> None:
    bus = Bus(recovered=False)
    client = bus.client()
    rid = client.ask("resume", Resume(), "fleet")
    assert client.take("finished") == []
    bus.worker("w0", intent=PAUSED, abilities=ABLE)
    client.ask("resume", Resume(), "fleet", rid=rid)
    assert status_of(client).pause == ""


def test_what_this_router_was_asked_for_counts_more_than_what_latecomers_know() -> None:
    bus = Bus()
    client, worker = bus.client(), bus.worker(abilities=ABLE)
    told(client, "pause", worker)
    told(client, "resume", worker)
    late = bus.worker("w9", intent=Intent((9, 9), INSTANCE, "abort"), abilities=ABLE)
    client.generate()
    client.generate()
    assert status_of(client).pause == ""
    assert intent_of(late).pause == ""


def test_an_intent_that_was_lost_is_told_again() -> None:
    bus = Bus()
    worker = bus.worker(abilities=ABLE)
    stamp = intent_of(worker).stamp
    worker.heartbeat()
    assert intent_of(worker).stamp == stamp


def test_members_and_clients_hear_which_fleet_it_is() -> None:
    bus = Bus(recovered=False)
    client = bus.client()
    assert client.take_body("welcome").fleet == ""
    bus.worker(intent=STARTED)
    bus.advance(1)
    news = [unpack(entry) for entry in client.take("members")]
    assert isinstance(news[-1], Members)
    assert news[-1].fleet == "fleet-x"


def test_a_second_router_without_the_store_names_no_fleet_before_it_is_found_out() -> None:
    bus = Bus()
    bus.worker(abilities=ABLE)
    bus.advance(NAMELESS_S - 5)
    client = bus.client()
    assert client.take_body("welcome").fleet == ""
    bus.advance(5)
    assert cast("Members", unpack(client.take("members")[-1])).fleet == INSTANCE


def test_a_router_that_was_given_the_fleets_name_tells_it_at_once() -> None:
    bus = Bus(fleet="given", recovered=False)
    client, worker = bus.client(), bus.worker(abilities=ABLE)
    assert client.take_body("welcome").fleet == "given"
    bus.advance(NAMELESS_S)
    assert (status_of(client).fleet, intent_of(worker).fleet) == ("given", "given")
    bus.store(intent=STARTED)
    assert status_of(client).fleet == "fleet-x"
    worker.version = 3
    worker.heartbeat()
    assert worker.take("dismissed") == []


def test_a_record_names_the_fleet_whatever_a_router_called_it_before() -> None:
    bus = Bus()
    bus.advance(NAMELESS_S)
    client, worker = bus.client(), bus.worker(abilities=ABLE)
    assert status_of(client).fleet == INSTANCE
    bus.store(intent=STARTED)
    assert status_of(client).fleet == "fleet-x"
    worker.version = 3
    worker.heartbeat()
    assert worker.take("dismissed") == []


def test_a_second_store_with_another_record_is_turned_away() -> None:
    bus = Bus()
    first = bus.store(intent=STARTED)
    first.is_alive = False
    bus.advance(4)
    other = bus.store(intent=Intent((1, 1), "fleet-y"))
    dismissed = unpack(other.take("dismissed")[0])
    assert isinstance(dismissed, Dismissed)
    assert dismissed.code == "other-fleet"
    assert "fleet-y" in dismissed.message


def test_weights_of_another_fleet_are_not_served() -> None:
    bus = Bus()
    bus.store(intent=STARTED)
    client = bus.client()
    foreign = bus.worker(version=124, intent=Intent((2, 2), "fleet-y"))
    client.generate()
    assert foreign.take_body("dismissed").code == "other-fleet"
    assert foreign.take("generate") == []
    unused = bus.worker("w1", intent=Intent((2, 2), "fleet-y"))
    bus.advance(1)
    assert unused.take("generate")


def test_a_worker_that_named_the_fleet_wrongly_is_turned_away_when_the_record_is_here() -> None:
    bus = Bus(recovered=False)
    stray = bus.worker(version=124, intent=Intent((2, 2), "fleet-y"))
    client = bus.client()
    assert status_of(client).fleet == "fleet-y"
    bus.store(intent=STARTED)
    stray.heartbeat()
    assert stray.take_body("dismissed").code == "other-fleet"
    assert status_of(client).fleet == "fleet-x"


@pytest.mark.parametrize("version", [0, 124])
def test_a_worker_that_is_turned_away_may_have_said_more_in_the_same_frame(version: int) -> None:
    bus = Bus(recovered=False)
    stray = bus.worker(version=124, intent=Intent((2, 2), "fleet-y"))
    stray.is_alive = False
    bus.store(intent=STARTED)
    beats = [Heartbeat(2, 124), Heartbeat(3, version, "paused", backlog=[("c", 1, 1)])]
    stray.say(*[Entry("beat", epoch=stray.epoch, body=pack(beat)) for beat in beats])
    assert [unpack_as(Dismissed, each).code for each in stray.take("dismissed")] == [
        "other-fleet",
        "unknown-peer",
    ]
    bus.advance(1)
    assert bus.core.context.members.laden() == []


def test_a_worker_that_took_this_fleets_weights_is_none_of_another() -> None:
    bus = Bus()
    bus.store(intent=STARTED)
    worker = bus.worker(intent=Intent((2, 2), "fleet-y"))
    worker.version = 3
    worker.heartbeat()
    assert worker.take("dismissed") == []
