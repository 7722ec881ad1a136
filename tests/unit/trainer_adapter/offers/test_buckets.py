# pyright: reportUnknownMemberType=false
# The stubs of torch leave parameters untyped.

import asyncio

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolloutbus.bus.weights.manifest import bytes_of, checksum, lay_out, total_bytes
from rolloutbus.bus.wire.messages.weights import Bucket, Manifest, Offer
from rolloutbus.engine_worker.weights.transports.buckets import in_buckets, offer_of
from rolloutbus.trainer_adapter.publisher.cuda_ipc import CudaIpcOffering
from rolloutbus.trainer_adapter.publisher.offering import checksums_of, fill, spans_of

SIZES = st.lists(st.integers(0, 700), min_size=1, max_size=30)


@given(SIZES, st.integers(1, 2000))
def test_spans_hold_all_bytes_in_order_and_only_a_large_tensor_exceeds_the_limit(
    sizes: list[int], limit: int
) -> None:
    layout = lay_out((f"t{i}", "U8", (n,)) for i, n in enumerate(sizes))
    spans = list(spans_of(layout, limit))
    assert [i for each in spans for i in range(each.first, each.end)] == list(range(len(sizes)))
    assert spans[0].start == 0
    ends = [each.start + each.size_bytes for each in spans]
    assert [each.start for each in spans[1:]] == ends[:-1]
    assert ends[-1] == total_bytes(layout)
    for each in spans:
        last = layout[each.end - 1]
        used = last.offset + last.size_bytes - each.start
        assert used <= limit or each.end == each.first + 1


@given(SIZES, st.integers(1, 2000), st.integers(0, 2**32 - 1))
def test_what_a_trainer_fills_in_a_worker_finds_again(
    sizes: list[int], limit: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    sources = [torch.from_numpy(rng.integers(0, 256, n, np.uint8)) for n in sizes]
    layout = lay_out((f"t{i}", "U8", (n,)) for i, n in enumerate(sizes))
    pieces: list[torch.Tensor] = []
    buckets: list[Bucket] = []
    for span in spans_of(layout, limit):
        piece = torch.zeros(span.size_bytes, dtype=torch.uint8)
        fill(piece, span, layout, sources)
        pieces.append(piece)
        buckets.append(Bucket(span.start, span.size_bytes, checksums_of([piece])[0]))
    manifest = Manifest(
        "p", 1, "", "", total_bytes(layout), layout, [Offer("collective", "x", buckets=buckets)]
    )
    offer = offer_of(manifest, "collective")
    version = in_buckets(manifest, "collective", offer.buckets, pieces, lambda: None)
    for source, found in zip(sources, version.tensors.values(), strict=True):
        assert np.array_equal(source.numpy(), np.asarray(found))


def test_a_bucket_has_the_bytes_of_the_version_cast_and_in_row_major_order() -> None:
    sources = [torch.randn(6, 4).t(), torch.randn(5), torch.tensor(1.5)]
    layout = lay_out([("a", "BF16", (4, 6)), ("b", "F32", (5,)), ("c", "F32", ())])
    (span,) = spans_of(layout, 1 << 20)
    piece = torch.zeros(span.size_bytes, dtype=torch.uint8)
    fill(piece, span, layout, sources)
    content = piece.numpy()
    first = sources[0].to(torch.bfloat16).contiguous().view(-1).view(torch.uint8)
    assert bytes_of(content, layout[0]).tobytes() == first.numpy().tobytes()
    assert bytes_of(content, layout[1]).tobytes() == sources[1].numpy().tobytes()
    assert bytes_of(content, layout[2]).tobytes() == sources[2].numpy().tobytes()
    assert checksums_of([piece]) == [checksum(content)]


async def test_tensors_that_are_not_on_one_gpu_are_not_offered_there() -> None:
    offering = CudaIpcOffering()
    layout = lay_out([("a", "F32", (4,))])
    async with asyncio.timeout(30.0):
        assert await offering.prepare(layout, [torch.randn(4)]) == []
        await offering.serve()
        await offering.close()
    offering.forget()
