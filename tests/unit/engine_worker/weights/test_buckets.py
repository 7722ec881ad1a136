import pytest

from rolloutbus.bus.weights.manifest import lay_out, total_bytes
from rolloutbus.bus.wire.messages.weights import Bucket, Manifest, Offer
from rolloutbus.engine_worker.weights.staged import CannotFetch
from rolloutbus.engine_worker.weights.transports.buckets import offer_of

LAYOUT = lay_out([("a", "U8", (64,)), ("b", "U8", (100,)), ("c", "U8", (10,))])


def manifest_of(*buckets: tuple[int, int]) -> Manifest:
    offer = Offer("collective", "x", buckets=[Bucket(start, n, 0) for start, n in buckets])
    return Manifest("p", 1, "", "", total_bytes(LAYOUT), LAYOUT, [offer])


def test_buckets_may_leave_out_the_gaps_between_tensors() -> None:
    assert offer_of(manifest_of((0, 64), (64, 100), (192, 10)), "collective").buckets


@pytest.mark.parametrize(
    ("buckets", "reason"),
    [
        ([], "lacks tensor 'a'"),
        ([(0, 64), (192, 10)], "lacks tensor 'b'"),
        ([(0, 100), (100, 102)], "lacks tensor 'b'"),
        ([(1, 201)], "lacks tensor 'a'"),
        ([(0, 192)], "lacks tensor 'c'"),
        ([(0, 128), (64, 138)], "overlap"),
        ([(0, 203)], "beyond"),
        ([(0, 2**63)], "beyond"),
    ],
)
def test_an_offer_without_every_whole_tensor_is_not_taken(
    buckets: list[tuple[int, int]], reason: str
) -> None:
    with pytest.raises(CannotFetch, match=reason):
        offer_of(manifest_of(*buckets), "collective")


def test_a_way_that_nobody_offers_is_not_taken() -> None:
    with pytest.raises(CannotFetch, match="nobody offers it"):
        offer_of(manifest_of((0, 202)), "cuda_ipc")
