"""Versions that are put tensor by tensor: what the store gets, and what is refused."""

# pyright: reportUnknownMemberType=false
# torch's stubs leave parameters untyped.

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rolloutbus.bus.weights.manifest import Bytes
from rolloutbus.bus.wire.errors import DeadlineExceeded, LocalProtocolError, Refused
from rolloutbus.trainer_adapter.publisher import pieces, publication
from rolloutbus.trainer_adapter.publisher.publisher import PublisherUpdate, WeightPublisher
from rolloutbus.trainer_adapter.publisher.tensor_source import Layout
from rolloutbus.trainer_adapter.publisher.weight_writer import Judgement, WeightWriter
from tests.integration.live_fleet import DEADLINE_S
from tests.integration.store_harness import store_harness
from tests.integration.test_publishing import Weights, digests_of, weights

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def layout_of(tensors: Weights, prefix: str = "") -> Layout:
    return [(prefix + name, each.dtype, tuple(each.shape)) for name, each in tensors.items()]


class _OwnError(Exception):
    """The trainer's own, which ends its block while a put runs."""

    def __init__(self, putting: asyncio.Task[None]) -> None:
        super().__init__()
        self.putting = putting


@pytest.mark.parametrize("push", ["shm", "tcp"])
async def test_tensors_are_what_they_were_when_they_were_put_in_any_order(
    tmp_path: Path, seed: int, push: str
) -> None:
    model, buffer = weights(seed), torch.empty(64, 32)
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness, writer=WeightWriter(may_map=push == "shm"))
        async with publisher.begin(layout=layout_of(model), deadline_s=DEADLINE_S) as update:
            for name in reversed(model):
                buffer.copy_(model[name])
                await update.put(name, buffer)
                buffer.fill_(torch.nan)  # used again, as a gather does
            assert update.published is None
        assert update.published is not None
        assert await harness.digests_kept(update.published.version) == digests_of(model)


async def test_tensors_may_be_put_at_once_and_none_of_them_twice(tmp_path: Path, seed: int) -> None:
    model = weights(seed)
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        async with publisher.begin(layout=layout_of(model), deadline_s=DEADLINE_S) as update:
            puts = [update.put(name, each) for name, each in model.items()]
            again = update.put("w0", torch.zeros(64, 32))
            *others, refused = await asyncio.gather(*puts, again, return_exceptions=True)
            assert others == [None] * len(model)
            assert isinstance(refused, Refused)
            assert "was put before" in str(refused)
        assert update.published is not None
        assert harness.asked.count("reserve_version") == 1
        assert await harness.digests_kept(update.published.version) == digests_of(model)


async def test_a_put_that_is_cancelled_leaves_its_reservation_to_the_next_one(
    tmp_path: Path, seed: int
) -> None:
    model = weights(seed)
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        async with publisher.begin(layout=layout_of(model), deadline_s=DEADLINE_S) as update:
            putting = asyncio.create_task(update.put("w0", model["w0"]))
            for _ in range(10):  # turns of the loop, in which it asks
                await asyncio.sleep(0)
            assert harness.asked == ["reserve_version"]
            putting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await putting
            for name, each in model.items():
                await update.put(name, each)
        assert harness.asked.count("reserve_version") == 1


async def test_tensors_are_cast_renamed_left_out_and_stripped_of_wrappers(
    tmp_path: Path, seed: int
) -> None:
    model = weights(seed)
    wrapped = "module._orig_mod."
    layout = [(wrapped + name, torch.bfloat16, tuple(each.shape)) for name, each in model.items()]
    as_bfloat16 = {name: each.bfloat16() for name, each in model.items()}

    def renamed(name: str) -> str | None:
        return None if name.endswith("w0") else f"model.{name.removeprefix(wrapped)}"

    async with store_harness(tmp_path) as harness:
        async with WeightPublisher(harness).begin(layout=layout, deadline_s=DEADLINE_S) as update:
            for name, each in model.items():
                await update.put(wrapped + name, each)
        assert update.published is not None
        assert await harness.digests_kept(update.published.version) == digests_of(as_bfloat16)
        publisher = WeightPublisher(harness, rename=renamed)
        async with publisher.begin(layout=layout, deadline_s=DEADLINE_S) as second:
            for name, each in model.items():
                await second.put(wrapped + name, each)
            version = await second.seal()
        assert [*await harness.digests_kept(version)] == ["model.w1", "model.w2", "model.w3"]


async def test_names_that_look_like_a_wrappers_are_those_that_rename_gave(
    tmp_path: Path, seed: int
) -> None:
    model = weights(seed)
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness, rename=lambda name: f"module.{name}")
        async with publisher.begin(layout=layout_of(model), deadline_s=DEADLINE_S) as update:
            for name, each in model.items():
                await update.put(name, each)
        assert update.published is not None
        kept = await harness.digests_kept(update.published.version)
        assert kept == {f"module.{name}": digest for name, digest in digests_of(model).items()}


async def test_a_publishers_dtype_is_that_of_every_layouts_weights(
    tmp_path: Path, seed: int
) -> None:
    model = weights(seed)
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness, dtype=torch.bfloat16)
        async with publisher.begin(layout=layout_of(model), deadline_s=DEADLINE_S) as update:
            for name, each in model.items():
                await update.put(name, each)
        assert update.published is not None
        as_bfloat16 = {name: each.bfloat16() for name, each in model.items()}
        assert await harness.digests_kept(update.published.version) == digests_of(as_bfloat16)


Put = Callable[[PublisherUpdate, Weights], Awaitable[None]]


async def _all_but_one(update: PublisherUpdate, model: Weights) -> None:
    for name in ("w0", "w1", "w2"):
        await update.put(name, model[name])


async def _one_twice(update: PublisherUpdate, model: Weights) -> None:
    await update.put("w3", model["w3"])
    await update.put("w3", model["w3"])


async def _one_infinite(update: PublisherUpdate, model: Weights) -> None:
    await _all_but_one(update, model)
    await update.put("w3", model["w3"] / 0)


async def _another_shape(update: PublisherUpdate, _: Weights) -> None:
    await update.put("w3", torch.zeros(2, 3))


async def _no_floats(update: PublisherUpdate, _: Weights) -> None:
    await update.put("w3", torch.zeros(64, 32, dtype=torch.int64))


async def _another_name(update: PublisherUpdate, model: Weights) -> None:
    await update.put("w9", model["w3"])


@pytest.mark.parametrize(
    ("do", "field", "told"),
    [
        (_all_but_one, "layout.w3", "it was not put"),
        (_one_twice, "layout.w3", "'w3' was put before"),
        (_one_infinite, "tensors.w3", "infinity or NaN"),
        (
            _another_shape,
            "layout.w3",
            "'w3' was put as torch.float32 [2, 3], not torch.float32 [64, 32]",
        ),
        (_no_floats, "layout.w3", "not torch.float32"),
        (_another_name, "layout.w9", "no tensor 'w9'"),
    ],
)
async def test_what_is_not_as_announced_is_refused_and_nothing_is_published(
    tmp_path: Path, seed: int, do: Put, field: str, told: str
) -> None:
    model = weights(seed)
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)

        async def publish() -> None:
            async with publisher.begin(layout=layout_of(model), deadline_s=DEADLINE_S) as update:
                await do(update, model)

        with pytest.raises(Refused) as caught:
            await publish()
        assert caught.value.field == field
        assert told in str(caught.value)
        assert harness.updates.published == []
        await publisher.publish(model, deadline_s=DEADLINE_S)  # the next one is not held up


async def test_a_block_that_ends_after_its_deadline_publishes_nothing(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = weights(seed)
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)

        async def publish_late() -> None:
            async with publisher.begin(deadline_s=DEADLINE_S) as update:
                await update.put_all(model)
                late = time.monotonic() + 2 * DEADLINE_S
                monkeypatch.setattr(publication, "time", SimpleNamespace(monotonic=lambda: late))

        with pytest.raises(DeadlineExceeded, match="nothing was published") as caught:
            await publish_late()
        monkeypatch.undo()
        assert caught.value.outcome == "not_started"
        assert harness.updates.published == []
        assert harness.asked[-1] == "settle_version"
        await publisher.publish(model, deadline_s=DEADLINE_S)


async def test_a_put_that_outlives_its_block_reserves_nothing(tmp_path: Path, seed: int) -> None:
    model = weights(seed)
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)

        async def left_after(n_turns: int) -> None:
            async with publisher.begin(layout=layout_of(model), deadline_s=DEADLINE_S) as update:
                putting = asyncio.create_task(update.put("w0", model["w0"]))
                for _ in range(n_turns):
                    await asyncio.sleep(0)
                with contextlib.suppress(Refused):  # as that of a `gather` whose first put failed
                    await update.put("typo", model["w0"])
                raise _OwnError(putting)

        for n_turns in range(8):
            n_asked = len(harness.asked)
            with pytest.raises(_OwnError) as caught:
                await left_after(n_turns)
            with pytest.raises(LocalProtocolError, match="the block of this update has ended"):
                await caught.value.putting
            # What it may have reserved by then is given back.
            assert harness.asked[n_asked:] in ([], ["reserve_version", "settle_version"])
        await publisher.publish(model, deadline_s=DEADLINE_S)


async def test_a_block_is_left_only_when_none_of_its_puts_writes_any_more(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place that it writes to is the next version's then."""
    model = weights(seed)
    begun, go, leaves = threading.Event(), threading.Event(), asyncio.Event()
    copied: list[Judgement] = []
    put_now = pieces.put

    def put_late(target: Bytes, dtype: torch.dtype, source: torch.Tensor) -> Judgement:
        begun.set()
        assert go.wait(DEADLINE_S)
        copied.append(put_now(target, dtype, source))
        return copied[-1]

    monkeypatch.setattr(pieces, "put", put_late)
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness, writer=WeightWriter(may_map=False))

        async def left() -> None:
            async with publisher.begin(layout=layout_of(model), deadline_s=DEADLINE_S) as update:
                putting = asyncio.create_task(update.put("w0", model["w0"]))
                assert await asyncio.to_thread(begun.wait, DEADLINE_S)
                leaves.set()
                raise _OwnError(putting)

        leaving = asyncio.create_task(left())
        async with asyncio.timeout(DEADLINE_S):
            await leaves.wait()
        for _ in range(20):  # turns of the loop: more than it takes to ask for anything
            await asyncio.sleep(0)
        asked = [*harness.asked]
        go.set()
        with pytest.raises(_OwnError) as caught:
            await leaving
        assert asked == ["reserve_version"]  # nothing was given back while it wrote
        assert len(copied) == 1
        with pytest.raises(LocalProtocolError, match="the block of this update has ended"):
            await caught.value.putting
        assert harness.asked == ["reserve_version", "settle_version"]
        monkeypatch.undo()
        published = await publisher.publish(model, deadline_s=DEADLINE_S)
        assert await harness.digests_kept(published.version) == digests_of(model)


async def test_a_put_without_a_layout_says_what_is_missing(tmp_path: Path, seed: int) -> None:
    model = weights(seed)
    async with store_harness(tmp_path) as harness:
        publisher = WeightPublisher(harness)
        async with publisher.begin(deadline_s=DEADLINE_S) as update:
            with pytest.raises(Refused, match=r"begin\(layout=\[\(name, dtype, shape\)"):
                await update.put("w0", model["w0"])
            await update.put_all(model)
        async with publisher.begin(layout=layout_of(model), deadline_s=DEADLINE_S) as second:
            with pytest.raises(LocalProtocolError, match="one put_all, or by `put`"):
                await second.put_all(model)
            for name, each in model.items():
                await second.put(name, each)
            await second.seal()
            with pytest.raises(LocalProtocolError, match="sealed"):
                await second.put("w0", model["w0"])


async def test_no_tensor_is_held_while_the_next_one_is_made(tmp_path: Path) -> None:
    layout = [(f"w{n}", torch.float32, (256, 256)) for n in range(8)]
    async with store_harness(tmp_path) as harness:
        async with WeightPublisher(harness).begin(layout=layout, deadline_s=DEADLINE_S) as update:
            for name, _, shape in layout:
                memory = np.ones(shape, np.float32)
                is_held = weakref.ref(memory)
                putting = update.put(name, torch.from_numpy(memory))
                del memory
                await putting
                assert is_held() is None
        assert update.published is not None
