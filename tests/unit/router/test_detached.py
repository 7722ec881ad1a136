"""Detached requests go on without their client, and wait for the next process of its name."""

from typing import Literal, cast

import msgspec
import pytest

from rolloutbus.bus.wire.codec import pack, unpack_result
from rolloutbus.bus.wire.entry import NO_BODY, Entry, Placement
from rolloutbus.bus.wire.messages.endings import Ack, Problem
from rolloutbus.bus.wire.messages.generation import (
    Abort,
    Attach,
    DetachedList,
    DetachedRequest,
    Generate,
    SamplingParams,
)
from rolloutbus.bus.wire.messages.membership import ClientHeartbeat, Goodbye
from rolloutbus.router.members.clients import Clients
from rolloutbus.router.requests.detached import (
    COLLECTED_S,
    MAX_DETACHED,
    UNHEARD_S,
    Detached,
)
from rolloutbus.router.requests.record import Request
from tests.unit.router.harness import Bus, SimClient, SimWorker

_PLACE = Placement("default", group="prompt-9", cost=10, outlives_client=True)
_BODY = pack(Generate(bytes(4), SamplingParams(max_new_tokens=8)))
_NEW_BOOT = "d" * 32


def _submit(client: SimClient, deadline_s: float = 1000, rid: str = "") -> str:
    rid = rid or client.next_rid()
    client.say(Entry("generate", rid, deadline_ms=int(deadline_s * 1000), place=_PLACE, body=_BODY))
    return rid


def _restarted(bus: Bus) -> SimClient:
    """The same name in a new process; the old one is dead."""
    for peer in bus.peers.values():
        peer.is_alive = peer.name != "trainer"
    client = SimClient(bus, "trainer")
    client.hello(_NEW_BOOT)
    return client


def _listed(client: SimClient) -> list[DetachedRequest]:
    client.ask("list_detached")
    (entry,) = client.take("finished")
    return cast("DetachedList", unpack_result("list_detached", entry)).requests


def _attach(client: SimClient, rid: str) -> None:
    client.ask("attach", Attach(), rid=rid)


def _running(bus: Bus) -> tuple[SimWorker, Entry]:
    """A worker that runs a detached request of client `trainer`."""
    worker, client = bus.worker(), bus.client()
    _submit(client)
    (command,) = worker.take("generate")
    worker.accept(command)
    worker.detached = [(command.rid, "prompt-9")]
    worker.heartbeat()
    return worker, command


def _ends(worker: SimWorker, command: Entry) -> None:
    worker.outbox.append((command.rid, command.attempt, "trainer"))
    worker.end(command)


def test_worker_is_told_that_the_request_is_detached() -> None:
    _, command = _running(Bus())
    assert command.place is not None
    assert command.place.outlives_client


def test_only_detached_work_goes_on_when_its_client_leaves() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    other = client.generate(deadline_s=1000)
    rid = _submit(client)
    worker.accept(*worker.take("generate"))
    client.say(Entry("goodbye", body=pack(Goodbye("closed"))))
    fenced = worker.take_body("fenced").items
    assert [each for each, _ in fenced] == [other]
    assert _listed(_restarted(bus)) == [DetachedRequest(rid, "running", "prompt-9", "w0")]


def test_work_of_a_replaced_process_is_stopped_unless_it_is_detached() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    other = client.generate(deadline_s=1000)
    _submit(client)
    worker.accept(*worker.take("generate"))
    _restarted(bus)
    assert [each for each, _ in worker.take_body("fenced").items] == [other]


def test_detached_request_that_waits_is_placed_while_its_client_is_silent() -> None:
    bus = Bus()
    client = bus.client()
    rid = _submit(client)
    client.is_alive = False
    bus.advance(40)
    assert "trainer" not in {each.name for each in bus.core.context.clients}
    worker = bus.worker()
    assert [each.rid for each in worker.take("generate")] == [rid]


def test_ending_is_kept_from_a_new_process_until_it_attaches() -> None:
    bus = Bus()
    worker, command = _running(bus)
    client = _restarted(bus)
    _ends(worker, command)
    worker.heartbeat()
    assert client.take("finished") == []
    assert _listed(client) == [DetachedRequest(command.rid, "ended", "prompt-9", "w0")]
    _attach(client, command.rid)
    (asked,) = worker.take("attach")
    assert (asked.attempt, asked.epoch) == (command.attempt, worker.epoch)
    worker.end(command)
    (ending,) = client.take("finished")
    client.acknowledge(ending)
    assert worker.take_body("ack").items == [(command.rid, command.attempt)]
    assert _listed(client) == []


def test_new_process_attaches_to_what_runs_and_gets_its_ending() -> None:
    bus = Bus()
    worker, command = _running(bus)
    client = _restarted(bus)
    _attach(client, command.rid)
    assert [each.route for each in client.take("accepted")] == ["w0"]
    _ends(worker, command)
    assert [each.rid for each in client.take("finished")] == [command.rid]


def test_nobody_attaches_to_the_request_of_another_client() -> None:
    bus = Bus()
    _, command = _running(bus)
    other = bus.client("other")
    _attach(other, command.rid)
    assert other.problem().code == "unknown_request"
    assert _listed(other) == []


def test_heartbeat_that_crossed_the_acknowledgement_does_not_bring_the_request_back() -> None:
    bus = Bus()
    worker, command = _running(bus)
    client = next(each for each in bus.peers.values() if isinstance(each, SimClient))
    _ends(worker, command)
    client.acknowledge(client.heard_one("finished"))
    worker.heartbeat()
    assert _listed(client) == []
    worker.outbox.clear()
    worker.heartbeat()
    assert "detached_uncollected" not in bus.counters


def test_ending_that_its_worker_dropped_is_counted_and_forgotten() -> None:
    bus = Bus()
    worker, command = _running(bus)
    client = _restarted(bus)
    _ends(worker, command)
    worker.heartbeat()
    worker.outbox.clear()
    worker.detached.clear()
    worker.heartbeat()
    assert bus.counters["detached_uncollected"] == 1
    _attach(client, command.rid)
    assert client.problem().code == "unknown_request"


def test_router_queues_again_what_was_lost_while_nobody_could_send_it() -> None:
    bus = Bus()
    worker, command = _running(bus)
    client = _restarted(bus)
    _attach(client, command.rid)
    client.take("accepted")
    worker.is_alive = False
    bus.advance(5)
    assert client.take("lost") == []
    (again,) = bus.worker("w1").take("generate")
    assert (again.rid, bytes(again.body)) == (command.rid, bytes(_BODY))
    assert again.attempt > command.attempt
    assert bus.counters["detached_requeued"] == 1


def test_client_that_holds_the_prompt_is_told_of_the_loss_as_ever() -> None:
    bus = Bus()
    worker, command = _running(bus)
    client = next(each for each in bus.peers.values() if isinstance(each, SimClient))
    worker.is_alive = False
    bus.advance(5)
    assert client.take_body("lost").items == [(command.rid, command.attempt)]
    assert "detached_requeued" not in bus.counters


def test_client_that_died_as_it_was_told_of_the_loss_is_not_waited_for() -> None:
    bus = Bus()
    worker, command = _running(bus)
    client = next(each for each in bus.peers.values() if isinstance(each, SimClient))
    client.is_alive = worker.is_alive = False
    worker.say(Entry("goodbye", epoch=worker.epoch, body=pack(Goodbye("left"))))
    assert len(client.take("lost")) == 1
    bus.advance(2)
    (again,) = bus.worker("w1").take("generate")
    assert (again.rid, bytes(again.body)) == (command.rid, bytes(_BODY))


def test_next_process_of_its_name_is_not_taken_for_the_one_that_was_told_of_the_loss() -> None:
    bus = Bus()
    worker, command = _running(bus)
    worker.is_alive = False
    worker.say(Entry("goodbye", epoch=worker.epoch, body=pack(Goodbye("left"))))
    _restarted(bus)
    bus.advance(2)
    (again,) = bus.worker("w1").take("generate")
    assert again.rid == command.rid


def test_client_that_lives_on_decides_by_itself_after_a_loss() -> None:
    bus = Bus()
    worker, _ = _running(bus)
    worker.is_alive = False
    worker.say(Entry("goodbye", epoch=worker.epoch, body=pack(Goodbye("left"))))
    bus.advance(4)
    assert bus.worker("w1").take("generate") == []


def test_request_that_a_worker_cannot_take_now_waits_for_another_one() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    _submit(client)
    (command,) = worker.take("generate")
    _restarted(bus)
    worker.state = "asleep"
    worker.heartbeat()
    worker.end(command, "refused", Problem("not_ready", "asleep", "not_started"))
    assert worker.take_body("ack").items == [(command.rid, command.attempt)]
    assert [each.rid for each in bus.worker("w1").take("generate")] == [command.rid]


def test_request_that_its_worker_stopped_by_itself_begins_again() -> None:
    bus = Bus()
    worker, command = _running(bus)
    _restarted(bus)
    worker.end(command, "cancelled")
    assert [each.rid for each in worker.take("generate")] == [command.rid]


def test_request_that_was_stopped_for_its_client_does_not_begin_again() -> None:
    bus = Bus()
    worker, command = _running(bus)
    client = next(each for each in bus.peers.values() if isinstance(each, SimClient))
    client.ask("abort", Abort([command.rid]))
    _restarted(bus)
    worker.end(command, "cancelled")
    assert worker.take("generate") == []


def test_restarted_router_begins_again_what_its_client_had_sent_it_too() -> None:
    bus = Bus(recovered=False)
    worker, client = bus.worker(), bus.client()
    rid = client.next_rid()
    worker.running, worker.detached = [(rid, (1, 7), "trainer")], [(rid, "prompt-9")]
    worker.heartbeat()
    _submit(client, rid=rid)
    bus.advance(4)
    _restarted(bus)
    worker.running, worker.detached = [], []
    worker.say(Entry("cancelled", rid, (1, 7), worker.epoch, "trainer"))
    assert [each.rid for each in worker.take("generate")] == [rid]


def test_list_goes_by_the_numbers_of_requests_whatever_else_a_worker_names() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    named = ["trainer/10", "trainer/x", "trainer/9"]
    worker.running = [(rid, (1, n), "trainer") for n, rid in enumerate(named, 5)]
    worker.detached = [(rid, "") for rid in named]
    worker.heartbeat()
    found = [each.rid for each in _listed(client)]
    assert [rid for rid in found if rid != "trainer/x"] == ["trainer/9", "trainer/10"]


def test_deadline_that_passed_unheard_is_told_upon_attaching_once() -> None:
    bus = Bus()
    rid = _submit(bus.client(), deadline_s=1)
    client = _restarted(bus)
    bus.advance(2)
    assert client.take("expired") == []
    assert _listed(client) == [DetachedRequest(rid, "ended", "prompt-9")]
    _attach(client, rid)
    assert client.ending() == ("expired", "deadline")
    client.say_over(rid)
    assert _listed(client) == []


def test_end_that_was_said_to_a_process_that_had_just_died_is_kept_for_the_next_one() -> None:
    bus = Bus()
    dead = bus.client()
    rid = _submit(dead, deadline_s=1)
    bus.advance(0.75)
    dead.is_alive = False
    bus.advance(1)
    assert dead.ending() == ("expired", "deadline")  # nobody reads it
    client = _restarted(bus)
    assert _listed(client) == [DetachedRequest(rid, "ended", "prompt-9")]
    _attach(client, rid)
    assert client.ending() == ("expired", "deadline")
    client.say_over(rid)
    assert _listed(_restarted(bus)) == []


def test_end_that_its_client_has_is_forgotten() -> None:
    bus = Bus()
    client = bus.client()
    rid = _submit(client, deadline_s=1)
    bus.advance(1.25)
    assert client.ending() == ("expired", "deadline")
    client.say_over(rid)
    fresh = _restarted(bus)
    assert _listed(fresh) == []
    _attach(fresh, rid)
    assert fresh.problem().code == "unknown_request"


def test_copy_of_what_a_dead_client_had_sent_is_no_sign_of_life() -> None:
    bus = Bus()
    dead = bus.client()
    rid = _submit(dead, deadline_s=1)
    bus.advance(0.75)
    dead.is_alive = False
    bus.advance(3)
    dead.say(Entry("client_beat", body=pack(ClientHeartbeat(1))))
    dead.say_over("trainer/99")
    bus.advance(0.25)
    assert _listed(_restarted(bus)) == [DetachedRequest(rid, "ended", "prompt-9")]


def test_new_router_learns_detached_work_and_endings_from_heartbeats() -> None:
    bus = Bus(recovered=False)
    worker = bus.worker()
    running, ended = ("trainer/8", (1, 5), "trainer"), ("trainer/7", (1, 4), "trainer")
    worker.running, worker.outbox = [running], [ended]
    worker.detached = [("trainer/8", "g8"), ("trainer/7", "g7")]
    worker.heartbeat()
    client = bus.client()
    client.ask("list_detached")
    assert client.take("finished") == []  # more may be reported yet
    bus.advance(4)
    assert _listed(client) == [
        DetachedRequest("trainer/7", "ended", "g7", "w0"),
        DetachedRequest("trainer/8", "running", "g8", "w0"),
    ]
    worker.end(Entry("generate", "trainer/7", (1, 4), route="trainer"))
    assert client.take("finished") == []
    _attach(client, "trainer/7")
    assert len(worker.take("attach")) == 1


def test_result_lost_with_its_worker_is_told_and_comes_back_with_it() -> None:
    bus = Bus()
    worker, command = _running(bus)
    client = _restarted(bus)
    _ends(worker, command)
    worker.is_alive = False
    bus.advance(5)
    assert _listed(client) == [DetachedRequest(command.rid, "ended", "prompt-9")]
    worker.lease_no += 1
    worker.connect()
    worker.hello()
    worker.heartbeat()
    assert _listed(client) == [DetachedRequest(command.rid, "ended", "prompt-9", "w0")]


def test_result_acknowledged_while_its_worker_is_away_is_not_kept_when_it_is_back() -> None:
    bus = Bus()
    worker, command = _running(bus)
    client = next(each for each in bus.peers.values() if isinstance(each, SimClient))
    _ends(worker, command)
    ending = client.heard_one("finished")
    worker.is_alive = False
    bus.advance(3.5)
    client.acknowledge(ending)
    worker.lease_no += 1
    worker.connect()
    worker.hello()
    worker.heartbeat()
    assert _listed(client) == []
    worker.end(command)
    assert [entry.rid for entry in client.take("finished")] == [command.rid]  # to be acked again


def test_what_is_remembered_is_bounded_in_number_and_time() -> None:
    detached = Detached(Clients(), 1.5)
    for number in range(MAX_DETACHED + 10):
        request = Request(f"c/{number}", "c", "c", _PLACE, "queued", None, NO_BODY)
        detached.add(request)
        detached.keep_unheard(request, "expired", Problem("deadline", "late", "not_started"))
        detached.collected(request)
    assert detached.requests == {}
    assert len(detached.listed("c")) == MAX_DETACHED
    assert detached.is_collected("c/5000", (0, 0))
    detached.tick(COLLECTED_S + 1)
    assert not detached.is_collected("c/5000", (0, 0))
    assert detached.tick(UNHEARD_S + 1) == MAX_DETACHED
    assert detached.listed("c") == []


def test_more_than_the_bound_is_refused() -> None:
    bus = Bus()
    for number in range(MAX_DETACHED):
        bus.core.context.detached.add(
            Request(f"c/{number}", "c", "c", _PLACE, "queued", None, NO_BODY)
        )
    client = bus.client()
    _submit(client)
    assert client.ending() == ("refused", "busy")


def _crashed_and_told(bus: Bus) -> tuple[SimWorker, str]:
    """A detached request whose engine host died, and then the client that was told of it."""
    worker, command = _running(bus)
    client = next(peer for peer in bus.peers.values() if peer.name == "trainer")
    worker.running.clear()
    worker.detached.clear()
    worker.say(Entry("goodbye", epoch=worker.epoch, body=pack(Goodbye("engine_killed"))))
    assert len(client.take("lost")) == 1
    return worker, command.rid


def test_what_was_lost_with_worker_and_client_is_listed_as_in_doubt_at_once() -> None:
    bus = Bus()
    _, rid = _crashed_and_told(bus)
    doubtful = DetachedRequest(rid, "waiting", "prompt-9", in_doubt=True)
    client = _restarted(bus)
    assert _listed(client) == [doubtful]
    bus.advance(2)
    assert _listed(client) == [DetachedRequest(rid, "waiting", "prompt-9")]


def test_who_collects_what_is_in_doubt_waits_for_it() -> None:
    bus = Bus()
    worker, rid = _crashed_and_told(bus)
    client = _restarted(bus)
    _attach(client, rid)
    assert client.take("refused") == []
    worker.lease_no += 1
    worker.hello()
    worker.heartbeat()
    (command,) = worker.take("generate")
    assert command.rid == rid
    worker.accept(command)
    worker.end(command)
    assert [each.rid for each in client.take("finished")] == [rid]


def test_the_process_that_gave_up_what_is_in_doubt_may_come_back_for_it() -> None:
    bus = Bus()
    worker, rid = _crashed_and_told(bus)
    client = next(peer for peer in bus.peers.values() if isinstance(peer, SimClient))
    _attach(client, rid)
    bus.advance(2)
    assert client.take("refused") == []
    worker.lease_no += 1
    worker.hello()
    worker.heartbeat()
    assert [command.rid for command in worker.take("generate")] == [rid]


def test_what_is_in_doubt_is_nobody_elses() -> None:
    bus = Bus()
    _, rid = _crashed_and_told(bus)
    other = bus.client("other")
    assert _listed(other) == []
    _attach(other, rid)
    assert other.problem().code == "unknown_request"


def _told_and_alive(bus: Bus) -> tuple[SimWorker, SimClient, str]:
    """A lost request whose process was told, lives on, and has a worker again."""
    worker, rid = _crashed_and_told(bus)
    worker.lease_no += 1
    worker.hello()
    worker.heartbeat()
    client = next(peer for peer in bus.peers.values() if isinstance(peer, SimClient))
    return worker, client, rid


def test_what_a_process_gave_up_is_queued_again_though_it_lives() -> None:
    bus = Bus()
    worker, client, rid = _told_and_alive(bus)
    bus.advance(5)
    assert worker.take("generate") == []  # it may be about to send it again
    assert _listed(client) == [DetachedRequest(rid, "waiting", "prompt-9", in_doubt=True)]
    bus.advance(7)
    assert {command.rid for command in worker.take("generate")} == {rid}


def test_what_its_process_sends_again_in_time_is_placed_once() -> None:
    bus = Bus()
    worker, client, rid = _told_and_alive(bus)
    bus.advance(2)
    _submit(client, rid=rid)
    (command,) = worker.take("generate")
    assert command.rid == rid
    worker.accept(command)
    worker.running = [(rid, command.attempt, "trainer")]
    worker.detached = [(rid, "prompt-9")]
    bus.advance(20)
    assert worker.take("generate") == []


def test_what_is_over_after_its_loss_is_not_sampled_for_nobody() -> None:
    bus = Bus()
    worker, client, rid = _told_and_alive(bus)
    client.say(Entry("ack", body=pack(Ack([], [rid]))))
    bus.advance(20)
    assert worker.take("generate") == []
    assert _listed(client) == []


_Way = Literal[
    "its client was silent",
    "its client died when told",
    "its client sent it again",
    "the router was restarted",
]
_WAYS: tuple[_Way, ...] = _Way.__args__


def _cut_off(way: _Way, deadline_s: float = 1000) -> tuple[Bus, list[str]]:
    """A request that waits here, and that a worker may go on with; then one that only waits."""
    is_restarted = way == "the router was restarted"
    bus = Bus(recovered=not is_restarted, queue_limit=2)
    client, rids = bus.client(), ["trainer/1", "trainer/2"]
    worker = None if is_restarted else bus.worker()
    entries: list[Entry] = []
    for rid, versions in zip(rids, ("any", "min:1"), strict=True):
        is_again = is_restarted and rid == rids[0]
        place = msgspec.structs.replace(_PLACE, versions=versions, resend=is_again)
        left_ms = int(deadline_s * 1000)
        entries.append(Entry("generate", rid, deadline_ms=left_ms, place=place, body=_BODY))
        client.say(entries[-1])
    if worker is not None:
        worker.accept(*worker.take("generate"))
        worker.is_alive = False
    client.is_alive = way in {"its client died when told", "its client sent it again"}
    while worker is not None and client.is_alive:
        bus.advance(0.25)
        client.is_alive = not client.take("lost")
    if way == "its client sent it again":
        client.say(entries[0])
    bus.advance(5)
    return bus, rids


@pytest.mark.parametrize("way", _WAYS)
def test_what_a_worker_that_was_cut_off_may_run_keeps_its_place_in_a_full_queue(way: _Way) -> None:
    bus, (begun, waiting) = _cut_off(way)
    other = bus.client("other")
    other.generate(deadline_s=100)
    assert other.take("refused") == []
    client = _restarted(bus)
    _attach(client, begun)
    assert client.take("refused") == []
    _attach(client, waiting)
    assert client.ending() == ("refused", "busy")


@pytest.mark.parametrize("way", _WAYS)
def test_deadline_of_what_a_worker_that_was_cut_off_may_run_leaves_that_open(way: _Way) -> None:
    bus, (begun, waiting) = _cut_off(way, deadline_s=10)
    bus.advance(10)
    client = _restarted(bus)
    outcomes: list[tuple[str, str]] = []
    for rid in (begun, waiting):
        _attach(client, rid)
        problem = client.problem()
        outcomes.append((problem.code, problem.outcome))
    assert outcomes == [("deadline", "unknown"), ("version_unavailable", "not_started")]


def test_what_a_worker_that_was_cut_off_may_run_waits_though_nobody_serves_its_policy() -> None:
    bus, (begun, _) = _cut_off("the router was restarted")
    bus.worker("w1", policy="judge")
    bus.advance(15)
    client = _restarted(bus)
    _attach(client, begun)
    assert client.take("refused") == []
    assert [each.rid for each in bus.worker().take("generate")] == [begun]


def test_what_is_sent_again_is_not_refused_though_there_is_neither_room_nor_its_worker() -> None:
    bus = Bus(queue_limit=1)
    bus.client("other").generate()
    client = bus.client()
    for rid, worker in (("trainer/1", ""), ("trainer/2", "w9")):
        place = msgspec.structs.replace(_PLACE, resend=True, worker=worker)
        client.say(Entry("generate", rid, deadline_ms=60_000, place=place, body=_BODY))
    bus.advance(20)
    assert client.take("refused") == []
    assert _listed(client) == []
