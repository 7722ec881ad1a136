"""Memory of the store is pinned for the GPU: copies in both directions go straight through it."""

# pyright: reportUnknownMemberType=false
# The stubs of torch leave parameters untyped.

import mmap
import time

import numpy as np
import pytest
import torch

from rolloutbus.bus.weights.manifest import Bytes, digest_of
from rolloutbus.bus.weights.page_lock import SLICE_BYTES, PageLock, cut
from rolloutbus.bus.weights.shm import SHM_DIR, SegmentWriter
from rolloutbus.engine_worker.weights.torch_tensors import DeviceCopies
from rolloutbus.trainer_adapter.publisher.weight_writer import put
from rolloutbus.trainer_adapter.store.segments import SegmentPool

GPU = torch.device("cuda", 0)
SIZE_BYTES = 2 * SLICE_BYTES + (4 << 20)
DEADLINE_S = 30.0


def mapped(size_bytes: int = SIZE_BYTES) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)


def pinned_parts(content: Bytes) -> list[bool]:
    """Of each slice, whether CUDA takes it for pinned."""
    whole = torch.as_tensor(content)
    return [whole[start:stop].is_pinned() for start, stop in cut(content.ctypes.data, len(content))]


def wait_until(content: Bytes, *, is_pinned: bool) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not all(each == is_pinned for each in pinned_parts(content)):
        assert time.monotonic() < deadline, pinned_parts(content)
        time.sleep(0.01)  # the locking thread tells nobody


def random_bytes(seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, (SIZE_BYTES,), generator=generator, device=GPU).to(torch.uint8)


@pytest.mark.parametrize("n_pinned", [0, 1, 3])
@pytest.mark.parametrize("is_computing", [False, True])
def test_copies_are_exact_however_much_is_pinned(
    n_pinned: int, seed: int, *, is_computing: bool
) -> None:
    torch.cuda.init()
    content = mapped()
    ends = [stop for _, stop in cut(content.ctypes.data, len(content))]
    pinned = PageLock(content[: ends[n_pinned - 1]], 0) if n_pinned else None
    if pinned is not None:
        pinned.wait()
        assert pinned_parts(content)[:n_pinned] == [True] * n_pinned
    given = random_bytes(seed)
    wanted = given.cpu().numpy()
    judged = put(content, torch.uint8, given)
    assert np.array_equal(content, wanted)
    assert judged.digest == digest_of(wanted)

    copies = DeviceCopies(GPU, lambda: is_computing)
    middle = SIZE_BYTES // 2 + 64
    copies.stage(1, {"first": content[:middle], "second": content[middle:]})
    staged = copies.of(1)
    assert torch.equal(staged["first"], given[:middle])
    assert torch.equal(staged["second"], given[middle:])
    if pinned is not None:
        pinned.close()
        wait_until(content, is_pinned=False)


def test_a_cast_lands_in_pinned_memory(seed: int) -> None:
    torch.cuda.init()
    content = mapped()
    pinned = PageLock(content, 0)
    pinned.wait()
    generator = torch.Generator("cuda").manual_seed(seed)
    given = torch.randn(SIZE_BYTES // 2, generator=generator, device=GPU)
    judged = put(content, torch.bfloat16, given)
    wanted = given.bfloat16().view(torch.uint8).cpu().numpy()
    assert np.array_equal(content, wanted)
    assert judged.digest == digest_of(wanted)
    pinned.close()
    wait_until(content, is_pinned=False)


def test_what_is_only_noted_as_conjugate_is_written_out(seed: int) -> None:
    torch.cuda.init()
    content = mapped()
    generator = torch.Generator("cuda").manual_seed(seed)
    given = torch.randn(
        SIZE_BYTES // 8, dtype=torch.complex64, generator=generator, device=GPU
    ).conj()
    assert given.is_conj()
    judged = put(content, torch.complex64, given)
    wanted = torch.view_as_real(given.resolve_conj()).view(-1).view(torch.uint8).cpu().numpy()
    assert np.array_equal(content, wanted)
    assert judged.digest == digest_of(wanted)


def test_a_segment_stays_pinned_from_version_to_version_until_it_is_forgotten() -> None:
    torch.cuda.init()
    pool, writer = SegmentPool(SHM_DIR), SegmentWriter()
    try:
        first = pool.take(SIZE_BYTES)
        content = writer.content(first, SIZE_BYTES)
        writer.lock_pages(0)
        wait_until(content, is_pinned=True)
        pool.freeze(first)
        pool.retire(first, is_reusable=True)
        again = writer.content(pool.take(SIZE_BYTES), SIZE_BYTES)
        assert again.ctypes.data == content.ctypes.data
        assert all(pinned_parts(again))
        writer.forget()
        wait_until(content, is_pinned=False)
    finally:
        pool.close()


def test_a_writer_that_nobody_holds_any_more_leaves_nothing_pinned() -> None:
    torch.cuda.init()
    pool, writer = SegmentPool(SHM_DIR), SegmentWriter()
    try:
        content = writer.content(pool.take(SIZE_BYTES), SIZE_BYTES)
        writer.lock_pages(0)
        wait_until(content, is_pinned=True)
        del writer
        wait_until(content, is_pinned=False)
    finally:
        pool.close()


def test_memory_that_was_given_up_can_be_pinned_again() -> None:
    torch.cuda.init()
    for _ in range(3):
        content = mapped()
        pinned = PageLock(content, 0)
        pinned.close()  # perhaps before all is pinned
        wait_until(content, is_pinned=False)
        del content, pinned


def test_pinning_while_another_thread_captures_a_graph_spoils_nothing() -> None:
    ones = torch.ones(1024, device=GPU)
    (ones * 2).sum()  # so that nothing is loaded during the capture
    graph = torch.cuda.CUDAGraph()
    content = mapped()
    with torch.cuda.graph(graph):
        doubled = ones * 2
        pinned = PageLock(content, 0)
        pinned.wait()
    graph.replay()
    torch.cuda.synchronize()
    assert doubled.tolist() == [2.0] * 1024
    assert all(pinned_parts(content))
    pinned.close()
    wait_until(content, is_pinned=False)


def test_what_is_pinned_is_in_shared_memory_of_the_host() -> None:
    """A file that is written by one mapping is seen through the other after the GPU wrote it."""
    torch.cuda.init()
    pool, writer = SegmentPool(SHM_DIR), SegmentWriter()
    try:
        name = pool.take(SIZE_BYTES)
        content = writer.content(name, SIZE_BYTES)
        writer.lock_pages(0)
        wait_until(content, is_pinned=True)
        put(content, torch.uint8, torch.full((SIZE_BYTES,), 7, dtype=torch.uint8, device=GPU))
        assert digest_of(pool.content(name)) == digest_of(np.full(SIZE_BYTES, 7, np.uint8))
        writer.forget()
        wait_until(content, is_pinned=False)
    finally:
        pool.close()
