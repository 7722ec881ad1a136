"""Faults that only many seeds of the simulator had shown, each in a few steps."""

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.generation import Generate, SamplingParams
from rolloutbus.bus.wire.messages.weights import Committed, Prepared, PublishVersion
from tests.unit.router.harness import Bus

FAILED = Problem("update_failed", "no room", "failed")


def test_a_request_that_comes_back_after_its_deadline_is_not_given_to_another_worker() -> None:
    bus = Bus()
    first, client = bus.worker("w0", slots=1), bus.client()
    client.generate(deadline_s=1)
    assert len(first.take("generate")) == 1
    second = bus.worker("w1")
    bus.freeze(1.1)

    first.lease_no += 1
    first.hello()  # the request was never confirmed, so it waits again

    assert (first.take("generate"), second.take("generate")) == ([], [])
    assert client.ending() == ("expired", "deadline")


def test_a_command_sent_again_after_its_deadline_still_has_one() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.generate(deadline_s=0.5)

    bus.advance(3)

    assert [each.deadline_ms > 0 for each in worker.take("generate")] == [True] * 3


def test_a_worker_left_behind_by_a_commit_gets_nothing_from_one_that_is_lost_with_it() -> None:
    bus = Bus()
    store, lost, client = bus.store(), bus.worker("w2"), bus.client()
    client.generate(deadline_s=60)  # never confirmed
    good, bad = bus.worker("w1", slots=1), bus.worker("w0")
    client.ask("publish_version", PublishVersion("default", 1), deadline_s=60)
    for worker in (lost, good, bad):
        worker.end(worker.heard_one("prepare_update"), body=Prepared(1, 1, "shm", 1.0))
    store.end(store.heard_one("record_commit"), body=Done())
    good.version = 1
    good.end(good.heard_one("commit_update"), body=Committed(1, 2.5))
    full = [client.generate("min:1", deadline_s=60) for _ in range(2)]
    bad.end(bad.heard_one("commit_update"), "failed", FAILED)
    lost.is_alive = False

    bus.advance(4)  # its lease ends, and the update with it

    assert len({each.rid for each in good.take("generate")}) == len(full)
    assert bad.take("generate") == []


def test_a_heartbeat_confirms_what_the_lost_word_of_its_worker_had_said() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    rid = client.generate()
    command = worker.heard_one("generate")
    worker.running.append((rid, command.attempt, "trainer"))

    bus.advance(3)

    assert worker.take("generate") == []  # it is not sent again
    assert len(client.take("accepted")) == 1


def test_requests_that_were_found_at_a_worker_wait_side_by_side_when_it_is_lost() -> None:
    bus = Bus(recovered=False)
    worker, client = bus.worker(), bus.client()
    rids = [client.next_rid(), client.next_rid()]
    worker.running = [(rid, (1, n), "trainer") for n, rid in enumerate(rids)]
    worker.detached = [(rid, "g") for rid in rids]
    worker.heartbeat()
    place = Placement("default", cost=10, outlives_client=True)
    body = pack(Generate(bytes(4), SamplingParams(max_new_tokens=8)))
    for rid in rids:
        client.say(Entry("generate", rid, deadline_ms=60_000, place=place, body=body))
    bus.advance(4)
    client.is_alive = worker.is_alive = False

    bus.advance(4)

    assert [each.rid for each in bus.worker("w1").take("generate")] == rids
