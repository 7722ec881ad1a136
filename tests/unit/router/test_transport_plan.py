"""Which way each worker takes a version."""

import pytest
from msgspec.structs import replace

from rolloutbus.bus.wire.messages.membership import StoreFacts, WorkerFacts
from rolloutbus.bus.wire.messages.weights import Offer, PublishVersion, TransportChoice
from rolloutbus.router.updates.transport_plan import DEAR, Target, Way, plan_ways

STORE = StoreFacts("tcp://10.0.0.1:9", {}, "host-a")
ALL = ["collective", "cuda_ipc", "delta", "disk", "shm", "tcp"]
GPU = Offer("cuda_ipc", "GPU-1", "host-a")
GROUP = Offer("collective", "10.0.0.1:7", backend="gloo")
FILES = Offer("disk", "v7")


def _target(
    name: str = "w0",
    host: str = "host-b",
    *,
    transports: list[str] | None = None,
    gpu: str = "",
    has_base: bool = False,
    serves: bool = False,
) -> Target:
    facts = WorkerFacts(
        *("default", "ipc:///s", 4, 4096, 100, "fake", ["generate"]),
        host=host,
        gpus=[gpu] if gpu else [],
        bulk=f"tcp://{name}:9" if serves else "",
        transports=ALL if transports is None else transports,
    )
    return Target(name, facts, has_base=has_base)


def _body(*offers: Offer, transport: TransportChoice = "auto", version: int = 7) -> PublishVersion:
    return PublishVersion("default", version, transport=transport, offers=list(offers))


def _way(target: Target, body: PublishVersion) -> Way:
    return plan_ways([target], STORE, body)["w0"]


@pytest.mark.parametrize(
    ("target", "transport"),
    [
        (_target(host="host-a", gpu="GPU-1"), "cuda_ipc"),
        (_target(host="host-a", gpu="GPU-2"), "shm"),
        (_target(gpu="GPU-1"), "collective"),
        (_target(transports=["disk", "delta", "tcp"], has_base=True), "disk"),
        (_target(transports=["delta", "tcp"], has_base=True), "delta"),
        (_target(transports=["delta", "tcp"]), "tcp"),
        (_target(transports=["tcp"], has_base=True), "tcp"),
        (_target(host="host-a", transports=["tcp"]), "tcp"),
        (_target(host="", transports=[]), "tcp"),
    ],
)
def test_auto_takes_the_nearest_way_that_is_open_and_says_why(
    target: Target, transport: str
) -> None:
    way = _way(target, _body(GPU, GROUP, FILES))
    assert way.transport == transport
    assert way.why


def test_way_that_nobody_offers_is_not_taken() -> None:
    assert _way(_target(host="host-a", gpu="GPU-1"), _body()).transport == "shm"
    assert _way(_target(gpu="GPU-1", has_base=True), _body()).transport == "delta"


@pytest.mark.parametrize(
    ("forced", "target", "taken", "why"),
    [
        ("shm", _target(), "tcp", "the store is on another host"),
        ("shm", _target(host="host-a", transports=["tcp"]), "tcp", "this worker cannot take"),
        ("cuda_ipc", _target(gpu="GPU-1"), "tcp", "it is offered on another host"),
        ("cuda_ipc", _target(host="host-a"), "shm", "it has no GPU"),
        ("delta", _target(), "tcp", "it has no weights that a delta could be applied to"),
        ("delta", _target(host="host-a"), "shm", "it has no weights that a delta could be"),
        ("disk", _target(), "tcp", "the publisher does not offer it"),
        ("collective", _target()._replace(is_able=False), "tcp", "it cannot begin now"),
        ("collective", _target(host="host-a")._replace(is_able=False), "shm", "it cannot begin"),
    ],
)
def test_worker_that_cannot_take_the_forced_way_gets_the_nearest_one_and_the_reason(
    forced: TransportChoice, target: Target, taken: str, why: str
) -> None:
    way = _way(target, _body(GPU, GROUP, transport=forced))
    assert way.transport == taken
    assert way.why.startswith(f"{forced}: {why}")


def test_a_copy_goes_to_another_gpu_of_the_host_where_the_publisher_asks_for_it() -> None:
    way = _way(_target(host="host-a", gpu="GPU-2"), _body(GPU, transport="cuda_ipc"))
    assert way == Way("cuda_ipc", "the publisher asked for it")


def test_nccl_needs_a_gpu() -> None:
    nccl = Offer("collective", "10.0.0.1:7", backend="nccl")
    assert _way(_target(), _body(nccl, transport="collective")).transport == "tcp"
    assert _way(_target(gpu="GPU-5"), _body(nccl)).transport == "collective"


def test_an_engine_on_two_gpus_has_no_rank_in_a_group_of_nccl() -> None:
    nccl = Offer("collective", "10.0.0.1:7", backend="nccl")
    one, two = _target("w0", gpu="GPU-5"), _target("w1")
    two = two._replace(facts=replace(two.facts, gpus=["GPU-6", "GPU-7"]))
    ways = plan_ways([two, one], STORE, _body(nccl, transport="collective"))
    assert (ways["w0"].rank, ways["w0"].world) == (1, 2)
    assert ways["w1"] == Way("tcp", "collective: nccl needs an engine on one GPU")


def test_ranks_are_those_who_take_part_and_the_trainer_is_one_of_the_world() -> None:
    targets = [_target("w0"), _target("w1", transports=["tcp"]), _target("w2")]
    ways = plan_ways(targets, STORE, _body(GROUP))
    assert {name: (way.rank, way.world) for name, way in ways.items()} == {
        "w0": (1, 3),
        "w1": (0, 0),
        "w2": (2, 3),
    }


def test_workers_on_other_hosts_pull_down_a_tree_of_two() -> None:
    targets = [_target(f"w{n}", serves=True) for n in range(6)]
    ways = plan_ways(targets, STORE, _body(transport="tcp"))
    assert {name: way.sources for name, way in ways.items()} == {
        "w0": (),
        "w1": ("tcp://w0:9",),
        "w2": ("tcp://w0:9",),
        "w3": ("tcp://w1:9",),
        "w4": ("tcp://w1:9",),
        "w5": ("tcp://w2:9",),
    }


def test_worker_that_serves_nobody_is_a_leaf() -> None:
    targets = [_target("w0"), _target("w1", serves=True), _target("w2", serves=True)]
    ways = plan_ways(targets, STORE, _body(transport="tcp"))
    assert ways["w1"].sources == ()
    assert ways["w2"].sources == ("tcp://w1:9",)
    assert ways["w0"].sources == ("tcp://w1:9",)


def test_without_anybody_who_serves_all_pull_from_the_store() -> None:
    ways = plan_ways([_target(f"w{n}") for n in range(5)], STORE, _body(transport="tcp"))
    assert {way.sources for way in ways.values()} == {()}


def test_worker_on_the_hosts_own_machine_is_outside_of_the_tree() -> None:
    targets = [_target("w0", "host-a", serves=True), _target("w1", serves=True)]
    ways = plan_ways(targets, STORE, _body(transport="tcp"))
    assert {way.sources for way in ways.values()} == {()}


def test_late_joiner_asks_those_who_have_the_version_before_the_store() -> None:
    holders = [_target(f"h{n}", serves=n != 1).facts for n in range(4)]
    way = plan_ways([_target("w0", serves=True)], STORE, _body(), holders)["w0"]
    assert way.sources == ("tcp://h0:9", "tcp://h2:9")


def test_files_that_the_store_writes_need_no_offer_of_the_publisher() -> None:
    store = StoreFacts("tcp://10.0.0.1:9", {}, "host-a", has_files=True)
    for transport in ("auto", "disk"):
        way = plan_ways([_target(transports=["disk", "tcp"])], store, _body(transport=transport))
        assert way["w0"].transport == "disk"


@pytest.mark.parametrize(
    ("n_workers", "share", "n_deltas"),
    [
        (10, 0.1, 10),
        (11, 0.1, 1),
        (3, 0.49, 1),
        (3, 1.0, 1),
        (2, 0.49, 2),
        (2, None, 1),
        (1, None, 1),
    ],
)
def test_deltas_that_are_more_than_the_version_go_to_one_worker_at_most(
    n_workers: int, share: float | None, n_deltas: int
) -> None:
    ways = ["delta", "tcp"]
    targets = [
        _target(f"w{n}", transports=ways, has_base=True, serves=True) for n in range(n_workers)
    ]
    plan = plan_ways(targets, STORE, _body(), (), share)
    deltas = [name for name, way in plan.items() if way.transport == "delta"]
    assert len(deltas) == n_deltas
    if 1 == n_deltas < n_workers:
        bulk = f"tcp://{deltas[0]}:9"
        assert all(bulk not in way.sources for way in plan.values())
        assert {way.why for name, way in plan.items() if name != deltas[0]} == {DEAR}


def test_workers_that_pass_nothing_on_take_deltas_however_many_they_are() -> None:
    targets = [_target(f"w{n}", transports=["delta", "tcp"], has_base=True) for n in range(20)]
    plan = plan_ways(targets, STORE, _body(), (), 0.9)
    assert {way.transport for way in plan.values()} == {"delta"}


def test_who_asks_for_deltas_gets_deltas() -> None:
    targets = [_target(f"w{n}", has_base=True, serves=True) for n in range(20)]
    plan = plan_ways(targets, STORE, _body(transport="delta"), (), 0.9)
    assert {(way.transport, way.sources) for way in plan.values()} == {("delta", ())}
