"""A request that kills engines is found, run alone, and given up; its neighbours are not."""

from pathlib import Path

import msgspec

from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import NO_BODY, Entry, Placement
from rolloutbus.bus.wire.messages.endings import Lost
from rolloutbus.bus.wire.messages.generation import Abort
from rolloutbus.bus.wire.messages.membership import Goodbye
from rolloutbus.router.health.dead_letters import MAX_BODY_BYTES, DeadLetter, append_letters
from rolloutbus.router.health.suspicion import KEPT_MAX, KEPT_S, Suspicions
from tests.unit.router.harness import Bus, SimClient, SimWorker

_PLACE = Placement("default", cost=10)


def _crash(worker: SimWorker, reason: str = "engine_crashed") -> None:
    """The worker's engine dies; the worker is back at once with a new one."""
    worker.say(Entry("goodbye", epoch=worker.epoch, body=pack(Goodbye(reason))))
    worker.running.clear()
    worker.take("generate")
    worker.lease_no += 1
    worker.hello()
    worker.heartbeat()


def _crashed_together(bus: Bus, times: int) -> tuple[SimWorker, list[str]]:
    """Two requests that ran side by side on w0 each time its engine died."""
    worker, client = bus.worker("w0"), bus.client()
    rids = [client.generate(deadline_s=1000) for _ in range(2)]
    for _ in range(times):
        worker.accept(*worker.take("generate"))
        _crash(worker)
        for rid in rids:
            client.submit(rid, 1000, resend=True)
    return worker, rids


def test_after_one_crash_the_requests_still_run_side_by_side() -> None:
    bus = Bus()
    worker, rids = _crashed_together(bus, 1)
    assert [each.rid for each in worker.take("generate")] == rids


def test_after_two_crashes_each_runs_alone_and_nothing_joins_it() -> None:
    bus = Bus()
    worker, rids = _crashed_together(bus, 2)
    other = bus.client("other")
    neighbour = other.generate(deadline_s=1000)
    (alone,) = worker.take("generate")
    assert alone.rid == rids[0]
    worker.accept(alone)
    worker.end(alone)
    (alone,) = worker.take("generate")
    assert alone.rid == rids[1]
    worker.end(alone)
    bus.advance(0.5)
    assert [each.rid for each in worker.take("generate")] == [neighbour]
    assert bus.counters["isolated"] == 2
    assert "poisoned" not in bus.counters


def _trainer(bus: Bus) -> SimClient:
    found = next(peer for peer in bus.peers.values() if peer.name == "trainer")
    assert isinstance(found, SimClient)
    return found


def test_one_death_alone_is_not_poison_yet() -> None:
    bus = Bus()
    worker, rids = _crashed_together(bus, 2)
    client = _trainer(bus)
    worker.accept(*worker.take("generate"))
    _crash(worker)
    assert client.take("failed") == []
    client.submit(rids[0], 1000, resend=True)
    for _ in rids:
        (alone,) = worker.take("generate")
        worker.accept(alone)
        worker.end(alone)
    assert {each.rid for each in client.take("finished")} == set(rids)
    assert "poisoned" not in bus.counters


def test_second_death_alone_is_poison_and_stays_so() -> None:
    bus = Bus()
    worker, rids = _crashed_together(bus, 2)
    client = _trainer(bus)
    client.heard.clear()
    worker.accept(*worker.take("generate"))
    _crash(worker)
    assert [(each.kind, each.rid) for each in client.take("lost", "failed")] == [("lost", "")]
    (innocent,) = worker.take("generate")
    assert innocent.rid == rids[1]
    worker.accept(innocent)
    worker.end(innocent)
    client.acknowledge(client.take("finished")[0])
    client.submit(rids[0], 1000, resend=True)
    worker.accept(*worker.take("generate"))
    _crash(worker)
    (failed,) = client.take("failed")
    assert failed.rid == rids[0]
    assert msgspec.msgpack.decode(failed.body)["code"] == "poison"
    assert client.take("lost") == []
    place = Entry("generate", rids[0], deadline_ms=900)
    again = msgspec.structs.replace(place, place=msgspec.structs.replace(_PLACE, resend=True))
    client.say(again)
    assert [each.rid for each in client.take("failed")] == [rids[0]]
    assert bus.counters["poisoned"] == 1
    (letter,) = bus.core.dead_letters
    assert (letter.rid, letter.client) == (rids[0], "trainer")
    assert worker.take("generate") == []


def test_poison_that_is_alone_by_chance_is_found_at_its_third_death() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    rid = client.generate(deadline_s=1000)
    for _ in range(2):
        worker.accept(*worker.take("generate"))
        _crash(worker)
        assert client.take("failed") == []
        client.submit(rid, 1000, resend=True)
    worker.accept(*worker.take("generate"))
    _crash(worker)
    assert client.ending() == ("failed", "poison")


def test_second_run_alone_is_on_another_worker_if_there_is_one() -> None:
    bus = Bus()
    w0, rids = _crashed_together(bus, 2)
    client = _trainer(bus)
    client.ask("abort", Abort([rids[1]]))
    w0.accept(*w0.take("generate"))
    w1 = bus.worker("w1")
    _crash(w0)
    client.submit(rids[0], 1000, resend=True)
    assert w0.take("generate") == []
    (alone,) = w1.take("generate")
    assert alone.rid == rids[0]


def test_request_that_a_worker_had_not_begun_is_not_charged() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    client.generate(deadline_s=1000)
    for _ in range(4):
        worker.heard.clear()
        worker.running.clear()
        worker.say(Entry("goodbye", epoch=worker.epoch, body=pack(Goodbye("engine_crashed"))))
        worker.lease_no += 1
        worker.hello()
        worker.heartbeat()
    assert len(worker.take("generate")) == 1
    assert "isolated" not in bus.counters


def test_engine_that_is_killed_charges_its_worker_and_no_request() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    rid = client.generate(deadline_s=1000)
    for _ in range(4):
        worker.accept(*worker.take("generate"))
        client.heard.clear()
        _crash(worker, "engine_killed")
        (lost,) = client.take("lost")
        body = unpack(lost)
        assert isinstance(body, Lost)
        assert body.reason == "engine_killed"
        client.submit(rid, 1000, resend=True)
    assert "isolated" not in bus.counters
    assert _states(bus) == ["ready"]
    worker.accept(*worker.take("generate"))
    _crash(worker, "engine_killed")
    assert _states(bus) == ["tripped"]


def test_worker_that_gives_its_engine_up_is_tripped_at_once_and_its_requests_are_charged() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    rid = client.generate(deadline_s=1000)
    worker.accept(*worker.take("generate"))
    worker.say(Entry("goodbye", epoch=worker.epoch, body=pack(Goodbye("engine_failed: no CUDA"))))
    (lost,) = client.take("lost")
    body = unpack(lost)
    assert isinstance(body, Lost)
    assert (body.items[0][0], body.reason) == (rid, "engine_crashed")
    assert bus.core.status(bus.now).troubled == {"w0": "engine_failed: no CUDA"}
    bus.worker("w0")
    assert _states(bus) == ["tripped"]


def _states(bus: Bus) -> list[str]:
    return [each.state for each in bus.core.status(bus.now).workers]


def test_a_busy_worker_is_emptied_first_while_others_serve() -> None:
    bus = Bus()
    w0, _ = _crashed_together(bus, 1)
    w1 = bus.worker("w1")
    other = bus.client("other")
    commands = w0.take("generate")
    w0.accept(*commands)
    for _ in range(4):
        other.generate(deadline_s=1000)
    _crash(w0)
    client = next(p for p in bus.peers.values() if p.name == "trainer")
    assert isinstance(client, type(other))
    client.submit(commands[0].rid, 1000, resend=True)
    bus.advance(1)
    alone = [w for w in (w0, w1) if commands[0].rid in {e.rid for e in w.heard if e.rid}]
    assert len(alone) == 1
    assert bus.counters["isolated"] == 1


def test_killed_workers_are_not_charged() -> None:
    bus = Bus()
    worker, client = bus.worker(), bus.client()
    rid = client.generate(deadline_s=1000)
    for _ in range(4):
        worker.accept(*worker.take("generate"))
        worker.running.clear()
        worker.lease_no += 1
        worker.hello()
        worker.heartbeat()
        client.submit(rid, 1000, resend=True)
    assert len(worker.take("generate")) == 1
    assert "isolated" not in bus.counters


def test_success_clears_and_time_does_too() -> None:
    suspicions = Suspicions()
    for _ in range(2):
        suspicions.charge("c/1", 0.0, worker="w0", is_alone=True)
        suspicions.charge("c/2", 0.0, worker="w0")
    suspicions.clear("c/1")
    assert not suspicions.must_be_alone("c/1")
    assert suspicions.crashed_alone_on("c/1") == []
    assert suspicions.must_be_alone("c/2")
    suspicions.tick(KEPT_S + 1)
    assert len(suspicions) == 0


def test_suspicions_are_bounded() -> None:
    suspicions = Suspicions()
    for number in range(KEPT_MAX + 10):
        suspicions.charge(f"c/{number}", 0.0, worker="w0")
    assert len(suspicions) == KEPT_MAX


def test_dead_letters_are_private_appended_and_without_huge_bodies(tmp_path: Path) -> None:
    path = tmp_path / "dead-letters.msgpack"
    huge = msgspec.Raw(msgspec.msgpack.encode({"prompt": bytes(MAX_BODY_BYTES)}))
    for number, body in enumerate((NO_BODY, huge)):
        assert append_letters(path, [DeadLetter(f"c/{number}", "c", "why", body)]) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    records = path.read_bytes()
    one: dict[str, object] = {"rid": "c/0", "client": "c", "reason": "why", "body": {}}
    two = {**one, "rid": "c/1"}
    assert records == msgspec.msgpack.encode(one) + msgspec.msgpack.encode(two)
