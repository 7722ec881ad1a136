"""Versions that come in buckets: an offer, checked against the manifest, and its tensors."""

from collections.abc import Callable, Sequence

from rolloutbus.bus.weights.manifest import total_bytes
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import Bucket, Manifest, Offer
from rolloutbus.engine_worker.weights.raw_tensor import RawTensor
from rolloutbus.engine_worker.weights.staged import CannotFetch, Staged


def offer_of(manifest: Manifest, transport: str) -> Offer:
    """The manifest's offer of that transport; its buckets hold every tensor, each in one of them.

    Raises:
        CannotFetch: there is none, or it cannot be true.
    """
    offer = next((each for each in manifest.offers if each.transport == transport), None)
    if offer is None:
        raise CannotFetch("nobody offers it")
    end = 0
    for bucket in offer.buckets:
        if bucket.start < end:
            raise CannotFetch("the offer's buckets overlap")
        end = bucket.start + bucket.size_bytes
    if end > total_bytes(manifest.tensors):
        raise CannotFetch("the offer's buckets reach beyond the version")
    homes(manifest, offer.buckets)
    return offer


def homes(manifest: Manifest, buckets: Sequence[Bucket]) -> list[int]:
    """For each tensor the index of its bucket.

    Raises:
        CannotFetch: a tensor is in none.
    """
    found: list[int] = []
    i = 0
    for tensor in manifest.tensors:
        end = tensor.offset + tensor.size_bytes
        while i < len(buckets) and buckets[i].start + buckets[i].size_bytes < end:
            i += 1
        if i == len(buckets) or tensor.offset < buckets[i].start:
            raise CannotFetch(f"the offer lacks tensor {tensor.name!r}")
        found.append(i)
    return found


def in_buckets(
    manifest: Manifest,
    transport: str,
    buckets: Sequence[Bucket],
    pieces: Sequence[RawTensor],
    release: Callable[[], None],
    *,
    is_in_place: bool = False,
) -> Staged:
    """A verified version in one piece of memory per bucket, in host or GPU memory.

    `pieces` are uint8 [at least the bucket's size]; `release` gives them back. `is_in_place`: no
    byte was moved.
    """
    tensors: dict[str, RawTensor] = {}
    for tensor, home in zip(manifest.tensors, homes(manifest, buckets), strict=True):
        begin = tensor.offset - buckets[home].start
        tensors[tensor.name] = pieces[home][begin : begin + tensor.size_bytes]
    moved_bytes = 0 if is_in_place else sum(each.size_bytes for each in buckets)
    return Staged(manifest, transport, moved_bytes, tensors, release)


def wrong_bucket(bucket: Bucket) -> EngineFailed:
    """Builds the error for a bucket that arrived changed."""
    message = f"the bucket at byte {bucket.start} did not arrive as it was published"
    return EngineFailed(Problem("digest_mismatch", message, "failed", field="offers"))
