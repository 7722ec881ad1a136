"""Adapters of the weight store are brought to workers that join without them."""

import random

import pytest

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.control import Adapters, LoadLora, UnloadLora
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.weights import RecordCommit
from rolloutbus.router.context import lacking
from rolloutbus.router.members.records import Reason
from tests.unit.router.harness import Bus, SimStore, SimWorker

BULK = "tcp://127.0.0.1:9"
KEPT = {"default.judge": 2}
NO_ROOM = Problem("bad_request", "there is no room for it", "failed")


def _able(bus: Bus, name: str, **adapters: int) -> SimWorker:
    """A worker whose engine applies adapters, and has these."""
    worker = bus.worker(name, adapters=adapters, abilities=["generate", "load_lora"])
    bus.advance(0.5)
    return worker


def _load(worker: SimWorker) -> LoadLora:
    """Load what it is told to; returns what that was."""
    command = worker.heard_one("load_lora")
    ask = unpack(command)
    assert isinstance(ask, LoadLora)
    worker.end(command, body=Adapters({ask.name: ask.version}))
    return ask


def _recorded(store: SimStore) -> RecordCommit:
    command = store.heard_one("record_commit")
    body = unpack(command)
    assert isinstance(body, RecordCommit)
    store.end(command, body=Done())
    return body


def test_worker_that_joins_without_an_adapter_is_brought_it_before_it_serves() -> None:
    bus = Bus()
    bus.store(adapters=KEPT)
    late = _able(bus, "w0")
    bus.client().generate()
    assert late.take("generate") == []
    assert _load(late) == LoadLora("judge", 2, bulk=BULK)
    assert len(late.take("generate")) == 1
    bus.advance(35)
    assert late.take("load_lora") == []


def test_worker_that_has_all_adapters_serves_at_once() -> None:
    bus = Bus()
    bus.store(adapters=KEPT)
    worker = _able(bus, "w0", judge=2)
    bus.client().generate()
    assert len(worker.take("generate")) == 1
    assert worker.take("load_lora") == []


def test_worker_that_cannot_load_it_serves_and_is_asked_again_later() -> None:
    bus = Bus()
    bus.store(adapters=KEPT)
    worker = _able(bus, "w0")
    bus.client().generate()
    worker.end(worker.heard_one("load_lora"), "failed", NO_ROOM)
    assert len(worker.take("generate")) == 1
    bus.advance(29)
    assert worker.take("load_lora") == []
    bus.advance(2)
    assert _load(worker).name == "judge"


def test_each_adapter_is_tried_although_another_one_fails() -> None:
    bus = Bus()
    bus.store(adapters={"default.a": 1, "default.b": 5, "critic.c": 1})
    worker = _able(bus, "w0")
    worker.end(worker.heard_one("load_lora"), "failed", NO_ROOM)
    bus.client().generate()
    assert worker.take("generate") == []
    bus.advance(0.25)
    assert _load(worker).name == "b"
    assert len(worker.take("generate")) == 1


def test_worker_without_the_ability_is_not_asked() -> None:
    bus = Bus()
    bus.store(adapters=KEPT)
    worker = bus.worker()
    bus.client().generate()
    assert len(worker.take("generate")) == 1
    bus.advance(1)
    assert worker.take("load_lora") == []


def test_what_a_client_had_loaded_from_the_store_is_remembered_until_it_is_unloaded() -> None:
    bus = Bus()
    store, first, client = bus.store(), _able(bus, "w0"), bus.client()
    client.ask("load_lora", LoadLora("judge", 2, bulk=BULK), "worker:w0")
    _load(first)
    assert _recorded(store) == RecordCommit("default.judge", 2, is_adapter=True)
    late = _able(bus, "w1")
    assert _load(late).version == 2
    client.ask("unload_lora", UnloadLora("judge"), "worker:w0")
    first.end(first.heard_one("unload_lora"), body=Adapters({}))
    assert _recorded(store) == RecordCommit("default.judge", 0, is_adapter=True)
    bus.advance(1)
    assert _able(bus, "w2").take("load_lora") == []
    assert first.take("load_lora") == []


def test_what_comes_from_files_or_fails_is_not_remembered() -> None:
    bus = Bus()
    store, worker, client = bus.store(), _able(bus, "w0"), bus.client()
    client.ask("load_lora", LoadLora("judge", 2, path="judge"), "worker:w0")
    _load(worker)
    client.ask("load_lora", LoadLora("other", 2, bulk=BULK), "worker:w0")
    worker.end(worker.heard_one("load_lora"), "failed", NO_ROOM)
    bus.advance(1)
    assert store.take("record_commit") == []
    assert _able(bus, "w1").take("load_lora") == []


def test_what_the_store_does_not_keep_is_brought_to_nobody() -> None:
    bus = Bus()
    store, worker, client = bus.store(), _able(bus, "w0"), bus.client()
    client.ask("load_lora", LoadLora("judge", 2, bulk=BULK), "worker:w0")
    _load(worker)
    gone: Entry = store.heard_one("record_commit")
    store.end(gone, "failed", Problem("version_unavailable", "not here", "not_started"))
    assert _able(bus, "w1").take("load_lora") == []


def _answers(worker: SimWorker, has: dict[str, int], *, fails: bool) -> None:
    """Do what it was told, or fail at it; `has` is what its engine holds."""
    for kind in ("load_lora", "unload_lora"):
        for command in worker.take(kind):
            body = unpack(command)
            if isinstance(body, LoadLora) and fails:
                worker.end(command, "failed", NO_ROOM)
                continue
            if isinstance(body, LoadLora):
                has[body.name] = body.version
            elif isinstance(body, UnloadLora):
                has.pop(body.name, None)
            worker.end(command, body=Adapters(dict(has)))


@pytest.mark.parametrize("seed", range(4))
def test_workers_that_lack_an_adapter_are_those_that_a_look_at_all_finds(seed: int) -> None:
    rng = random.Random(seed)
    bus = Bus()
    store, client = bus.store(adapters=KEPT), bus.client()
    workers: dict[str, tuple[SimWorker, dict[str, int]]] = {}
    context = bus.core.context
    for n in range(60):
        match rng.choice(["join", "leave", "load", "unload", "wait"]):
            case "join":
                has = {name: 2 for name in ("judge", "style") if rng.random() < 0.5}
                workers[f"w{n}"] = (_able(bus, f"w{n}", **has), has)
            case "leave" if workers:
                workers.pop(rng.choice([*workers]))[0].is_alive = False
                bus.advance(4)
            case "load" if workers:
                ask, target = LoadLora("style", rng.randint(1, 3), bulk=BULK), [*workers]
                client.ask("load_lora", ask, f"worker:{rng.choice(target)}")
            case "unload" if workers:
                client.ask("unload_lora", UnloadLora("style"), f"worker:{rng.choice([*workers])}")
            case _:
                bus.advance(rng.choice([0.5, 31.0]))
        for worker, has in workers.values():
            _answers(worker, has, fails=rng.random() < 0.2)
        for command in store.take("record_commit"):
            store.end(command, body=Done())
        bus.advance(0.6)  # a tick at least
        found = {each.name for each in context.members.workers() if lacking(context, each)}
        assert found <= context.may_lack.keys()
    for _ in range(100):
        for worker, has in workers.values():
            _answers(worker, has, fails=False)
        for command in store.take("record_commit"):
            store.end(command, body=Done())
        bus.advance(1)
    assert not [each for each in context.members.workers() if lacking(context, each)]
    assert not [each for each in context.members.workers() if Reason.ADAPTERS in each.blocked_by]
    assert not context.may_lack, "ticks look at nobody"


def test_worker_serves_that_loads_a_newer_adapter_before_the_next_look() -> None:
    bus = Bus()
    store, client = bus.store(adapters=KEPT), bus.client()
    first, late = _able(bus, "w0", judge=2), _able(bus, "w1")
    own = late.heard_one("load_lora")
    client.ask("load_lora", LoadLora("judge", 3, bulk=BULK), "fleet")
    _load(first)
    asked = late.heard_one("load_lora")
    late.end(own, body=Adapters({"judge": 2}))
    late.end(asked, body=Adapters({"judge": 3}))
    _recorded(store)
    bus.advance(1)
    client.generate(worker="w1")
    assert len(late.take("generate")) == 1


def test_worker_serves_once_the_adapter_that_it_lacks_is_wanted_no_more() -> None:
    bus = Bus()
    store, client = bus.store(adapters=KEPT), bus.client()
    first = _able(bus, "w0", judge=2)
    late = bus.worker("w1", abilities=["generate", "load_lora"])
    late.state = "asleep"
    late.heartbeat()
    bus.advance(0.5)
    client.ask("unload_lora", UnloadLora("judge"), "worker:w0")
    first.end(first.heard_one("unload_lora"), body=Adapters({}))
    _recorded(store)
    late.state = "ready"
    bus.advance(1)
    assert late.take("load_lora") == []
    client.generate(worker="w1")
    assert len(late.take("generate")) == 1
