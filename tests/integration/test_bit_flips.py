"""One wrong bit, wherever it is, never becomes part of a staged version."""

import random
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from rolloutbus.bus.weights.manifest import Bytes
from rolloutbus.bus.weights.shm import SegmentWriter
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import (
    Committed,
    CommitUpdate,
    Manifest,
    Prepared,
    PrepareUpdate,
    Transport,
)
from rolloutbus.engine_worker.engine import Step
from rolloutbus.engine_worker.engines.fake.engine import FakeEngine
from rolloutbus.engine_worker.engines.fake.settings import FakeSettings
from rolloutbus.engine_worker.host.commands import HostCommands
from rolloutbus.engine_worker.weights.relay import open_relay
from tests.drills.chaos.proxy import Direction, ProxyLink
from tests.integration.live_fleet import DEADLINE_S
from tests.integration.relay_family import (
    digests_of,
    digests_staged,
    fake_model,
    family,
    model_of,
    put,
    receiver_of,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

N_FLIPS = 12
CONTEXT_BYTES = 16
"""So many random bytes are found at one place only."""


def flipped_tensor(manifest: Manifest, rng: random.Random, content: Bytes) -> str:
    """Flip one bit of a random tensor; returns its name."""
    tensor = rng.choice([each for each in manifest.tensors if each.size_bytes])
    content[tensor.offset + rng.randrange(tensor.size_bytes)] ^= 1 << rng.randrange(8)
    return tensor.name


class Flipper:
    """Flips one bit of a version on its way through a proxy."""

    def __init__(self, manifest: Manifest, content: Bytes, rng: random.Random) -> None:
        self._manifest = manifest
        self._content = content.tobytes()
        self._rng = rng
        self._after = rng.randrange(len(self._content) // 2)
        self.tensor = ""
        """Whose bit it was."""

    @asynccontextmanager
    async def between(self, upstream: str) -> AsyncGenerator[str]:
        """A link of its own: on an older one bytes may be under way that nobody waits for."""
        async with ProxyLink(upstream) as proxy:
            proxy.tamper = self
            yield proxy.endpoint

    def __call__(self, direction: Direction, data: bytes) -> bytes:
        if direction == "up" or self.tensor:
            return data
        self._after -= len(data)
        if self._after > 0 or len(data) < CONTEXT_BYTES:
            return data
        place = self._rng.randrange(len(data) - CONTEXT_BYTES + 1)
        offset = self._content.find(data[place : place + CONTEXT_BYTES])
        for tensor in self._manifest.tensors:
            if tensor.offset <= offset < tensor.offset + tensor.size_bytes:
                self.tensor = tensor.name
                changed = bytearray(data)
                changed[place] ^= 1 << self._rng.randrange(8)
                return bytes(changed)
        return data  # a frame begins there


@contextmanager
def one_wrong_bit(manifest: Manifest, rng: random.Random) -> Generator[str]:
    """In the store's segment; gives the name of the tensor."""
    content = SegmentWriter().content(manifest.segment, manifest.size_bytes)
    kept = content.copy()
    yield flipped_tensor(manifest, rng, content)
    content[:] = kept


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_every_bit_flip_in_the_segment_is_found(
    tmp_path: Path, seed: int, rng: random.Random, transport: Transport
) -> None:
    model = model_of(seed, 8)
    async with family(tmp_path, model) as here:
        manifest = await here.manifest()
        ask = replace(here.ask(), transport=transport)
        receiver = receiver_of(model)
        for _ in range(N_FLIPS):
            with one_wrong_bit(manifest, rng) as name, pytest.raises(EngineFailed) as caught:
                await receiver.prepare(ask, timeout_s=DEADLINE_S)
            assert caught.value.code == "digest_mismatch"
            assert caught.value.field == f"tensors.{name}"
        await receiver.prepare(ask, timeout_s=DEADLINE_S)
        assert digests_staged(receiver, here.version) == digests_of(model)
        receiver.close()


async def test_every_bit_flip_on_the_way_from_the_store_is_found(
    tmp_path: Path, seed: int, rng: random.Random
) -> None:
    model = model_of(seed, 8)
    async with family(tmp_path, model) as here:
        manifest, content = await here.manifest(), await here.content()
        receiver = receiver_of(model)
        for _ in range(N_FLIPS):
            flipper = Flipper(manifest, content, rng)
            async with flipper.between(here.store.bulk) as endpoint:
                with pytest.raises(EngineFailed) as caught:
                    await receiver.prepare(here.ask(bulk=endpoint), timeout_s=DEADLINE_S)
            assert caught.value.code == "digest_mismatch"
            assert caught.value.field == f"tensors.{flipper.tensor}"
        receiver.close()


async def test_bits_flipped_on_the_way_from_a_worker_come_from_the_store(
    tmp_path: Path, seed: int, rng: random.Random
) -> None:
    model = model_of(seed, 8)
    async with (
        family(tmp_path, model) as here,
        open_relay("tcp://127.0.0.1:0", None) as relay,
    ):
        manifest, content = await here.manifest(), await here.content()
        relay.hold(manifest, content)
        for _ in range(N_FLIPS):
            flipper = Flipper(manifest, content, rng)
            sent_before = here.link_bytes
            receiver = receiver_of(model)
            async with flipper.between(relay.bulk) as endpoint:
                await receiver.prepare(here.ask(endpoint), timeout_s=DEADLINE_S)
            assert digests_staged(receiver, here.version) == digests_of(model)
            tensor = next(each for each in manifest.tensors if each.name == flipper.tensor)
            assert here.link_bytes - sent_before > tensor.size_bytes
            receiver.close()


async def test_bits_flipped_in_the_buffer_of_a_worker_come_from_the_store(
    tmp_path: Path, seed: int, rng: random.Random
) -> None:
    model = model_of(seed, 8)
    async with family(tmp_path, model) as here, open_relay(f"ipc://{tmp_path}/r", None) as relay:
        manifest, content = await here.manifest(), await here.content()
        for _ in range(N_FLIPS):
            wrong = content.copy()
            name = flipped_tensor(manifest, rng, wrong)
            relay.end("default", here.version)
            relay.hold(manifest, wrong)
            sent_before = here.link_bytes
            receiver = receiver_of(model)
            await receiver.prepare(here.ask(relay.bulk), timeout_s=DEADLINE_S)
            assert digests_staged(receiver, here.version) == digests_of(model)
            tensor = next(each for each in manifest.tensors if each.name == name)
            assert here.link_bytes - sent_before > tensor.size_bytes
            receiver.close()


async def test_a_worker_that_finds_a_wrong_bit_keeps_its_old_weights(
    tmp_path: Path, seed: int, rng: random.Random
) -> None:
    old, new = fake_model(seed), fake_model(seed + 1)
    engine = FakeEngine(FakeSettings(), ignore)
    commands = HostCommands(engine, DEADLINE_S)

    async def do(kind: str, body: msgspec.Struct) -> msgspec.Struct:
        return (await commands.carry_out(Entry(kind, "c/1", body=pack(body))))[1]

    async with family(tmp_path, old) as here:
        first = PrepareUpdate("default", here.version, here.store.bulk)
        assert isinstance(await do("prepare_update", first), Prepared)
        commit = CommitUpdate("default", here.version, "keep")
        assert isinstance(await do("commit_update", commit), Committed)
        weights = dict(engine.content)
        second = replace(first, version=await put(here.store, new))
        manifest = await here.manifest(second.version)
        for transport in ("shm", "tcp"):
            with one_wrong_bit(manifest, rng):
                failed = await do("prepare_update", replace(second, transport=transport))
            assert isinstance(failed, Problem)
            assert failed.code == "digest_mismatch"
            not_staged = await do("commit_update", replace(commit, version=second.version))
            assert isinstance(not_staged, Problem)
            assert (engine.stats().version, dict(engine.content)) == (first.version, weights)
    engine.close()


def ignore(_: Step) -> None:
    """Nobody reads the tokens."""
