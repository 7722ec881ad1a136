"""Versions flow down a tree of workers: the store sends each byte about once, whoever dies."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from rolloutbus.bus.security.zmq_curve import dialer_of
from rolloutbus.bus.transport import bulk
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.transport.endpoints import with_key
from rolloutbus.bus.wire.codec import pack, unpack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.host import EngineReady
from rolloutbus.bus.wire.messages.weights import Chunk, PullChunk, PullManifest, PushChunk
from rolloutbus.engine_worker.settings import WorkerSettings
from rolloutbus.engine_worker.weights.receiver import ways_of_this_host
from rolloutbus.engine_worker.weights.relay import open_relay
from rolloutbus.engine_worker.worker.host_process import HostProcess
from tests.drills.chaos.proxy import ProxyLink
from tests.integration.key_directory import KeyDirectory
from tests.integration.live_fleet import DEADLINE_S, PACE_S, START_S, n_held
from tests.integration.relay_family import (
    TENSOR_BYTES,
    Node,
    are_right,
    bytes_in,
    digests_of,
    digests_staged,
    fake_model,
    family,
    model_of,
    put,
    receiver_of,
    specs_of,
)
from tests.integration.worker_bench import worker_process

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3 * START_S)]

TREES = {"chain": [None, 0], "tree": [None, 0, 0, 1]}
"""Each worker's parent; None: the store."""
N_ROUNDS = 30


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
async def test_the_store_sends_a_version_about_once(
    tmp_path: Path, seed: int, parents: list[int | None]
) -> None:
    model = model_of(seed)
    async with family(tmp_path, model) as here, AsyncExitStack() as nodes:
        endpoints = [f"ipc://{tmp_path}/n{i}" for i in range(len(parents))]
        workers = [
            await nodes.enter_async_context(Node(each, specs_of(model))) for each in endpoints
        ]
        for worker, parent in zip(workers, parents, strict=True):
            worker.tell_prepare(here.ask(*([] if parent is None else [endpoints[parent]])))
            await worker.hear("began")  # its children find a version that is on its way
        outcomes = [await each.outcome() for each in workers]
        assert are_right(outcomes, model)
        n_served = sum(each["moved_bytes"] for each in outcomes)
        assert bytes_in(model) * len(workers) <= n_served <= bytes_in(model) * len(workers) * 1.01
        assert bytes_in(model) <= here.link_bytes <= bytes_in(model) * 1.1
        assert [await each.leave() for each in workers] == [0] * len(workers)


async def test_children_of_a_killed_worker_finish_from_the_store(tmp_path: Path, seed: int) -> None:
    model = model_of(seed)
    async with AsyncExitStack() as nodes, family(tmp_path, model) as here, here.slow_lane() as slow:
        ends = [f"ipc://{tmp_path}/n{i}" for i in range(3)]
        parent, *children = [
            await nodes.enter_async_context(Node(each, specs_of(model))) for each in ends
        ]
        slow.stop_after(bytes_in(model) // 2)
        parent.tell_prepare(here.ask(bulk=slow.endpoint))
        await parent.hear("began")
        for child in children:
            child.tell_prepare(here.ask(ends[0]))
        for child in children:
            await child.has_proven(9)  # of the half that the parent has
        await parent.kill()
        outcomes = [await each.outcome() for each in children]
        assert are_right(outcomes, model)
        # What the parent gave was not asked for again.
        assert here.link_bytes < 2 * (bytes_in(model) - 7 * TENSOR_BYTES)


async def test_a_version_flows_on_while_it_arrives(tmp_path: Path, seed: int) -> None:
    model = model_of(seed, 16)
    async with family(tmp_path, model) as here, AsyncExitStack() as stack:
        manifest = await here.manifest()
        content = await here.content()
        nodes = [
            await stack.enter_async_context(open_relay(f"ipc://{tmp_path}/r{i}", None))
            for i in range(3)
        ]
        store = await stack.enter_async_context(BulkLink(here.store.bulk))
        nodes[0].begin(manifest, content)
        nodes[0].proven(manifest, content, range(8))
        ways = [ways_of_this_host(relay)["tcp"] for relay in nodes[1:]]
        pulls = [
            asyncio.create_task(way.fetch(here.ask(above.bulk), manifest, store))
            for way, above in zip(ways, nodes, strict=False)
        ]
        leaf = await stack.enter_async_context(BulkLink(nodes[2].bulk))
        async with asyncio.timeout(DEADLINE_S):
            first = await leaf.ask("pull_chunk", PullChunk("default", here.version, 0, 4096))
            assert first == Chunk(0, content[:4096].tobytes())
            assert not any(each.done() for each in pulls)
            nodes[0].proven(manifest, content, range(8, len(manifest.tensors)))
            for staged in [await each for each in pulls]:
                assert staged.moved_bytes == manifest.size_bytes


async def test_a_source_of_no_use_is_left_for_the_next_one(tmp_path: Path, seed: int) -> None:
    model = model_of(seed, 4)
    async with family(tmp_path, model) as here, open_relay(f"ipc://{tmp_path}/r", None) as relay:
        relay.hold(await here.manifest(), await here.content())
        receiver = receiver_of(model)
        nobody, no_endpoint, no_worker = f"ipc://{tmp_path}/nobody", "carrier-pigeon://x", "ipc:///"
        sources = [nobody, no_endpoint, no_worker, relay.bulk]
        prepared = await receiver.prepare(here.ask(*sources), timeout_s=DEADLINE_S)
        assert prepared.moved_bytes == relay.sent_bytes
        assert all(each in prepared.why for each in sources[:3])
        assert here.link_bytes < TENSOR_BYTES
        receiver.close()


async def test_a_silent_source_is_left(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "SILENT_S", 0.3)
    model = model_of(seed, 4)
    async with family(tmp_path, model) as here, ProxyLink(here.store.bulk) as silent:
        silent.cut()
        receiver = receiver_of(model)
        await receiver.prepare(here.ask(silent.endpoint), timeout_s=DEADLINE_S)
        assert digests_staged(receiver, here.version) == digests_of(model)
        receiver.close()


async def test_a_version_is_served_until_its_buffer_is_used_again(
    tmp_path: Path, seed: int
) -> None:
    model = model_of(seed, 4)
    async with (
        family(tmp_path, model) as here,
        open_relay(f"ipc://{tmp_path}/r", None) as relay,
        BulkLink(relay.bulk) as child,
    ):
        ask = PullChunk("default", here.version, 0, 4096)
        receiver = receiver_of(model, relay)
        await receiver.prepare(here.ask(), timeout_s=DEADLINE_S)
        chunk = await child.ask("pull_chunk", ask)
        receiver.drop(here.version)  # it is active now
        assert await child.ask("pull_chunk", ask) == chunk
        newer = await put(here.store, model_of(seed + 1, 4))
        await receiver.prepare(replace(here.ask(), version=newer), timeout_s=DEADLINE_S)
        with pytest.raises(EngineFailed) as caught:
            await child.ask("pull_chunk", ask)
        assert caught.value.code == "version_unavailable"
        receiver.close()


async def test_with_keys_only_workers_are_served(tmp_path: Path, seed: int) -> None:
    model = model_of(seed, 4)
    keys = KeyDirectory(tmp_path)
    keys.add("w1", "worker")
    keys.add("w2", "worker")
    keys.add("boss", "trainer")
    async with (
        family(tmp_path, model) as here,
        open_relay("tcp://127.0.0.1:0", keys.server_settings("w1")) as relay,
    ):
        relay.hold(await here.manifest(), await here.content())
        ask = PullChunk("default", here.version, 0, 4096)
        async with asyncio.timeout(DEADLINE_S):
            async with BulkLink(relay.bulk, dialer_of(keys.client_settings("w2"))) as worker:
                assert isinstance(await worker.ask("pull_chunk", ask), Chunk)
            async with BulkLink(relay.bulk, dialer_of(keys.client_settings("boss"))) as trainer:
                with pytest.raises(EngineFailed) as caught:
                    await trainer.ask("pull_chunk", ask)
        assert caught.value.code == "forbidden"


async def test_an_engine_host_with_keys_serves_behind_a_lock(tmp_path: Path) -> None:
    keys = KeyDirectory(tmp_path)
    keys.add("w1", "worker")
    keys.add("w2", "worker")
    router = keys.make_unlisted("router")
    ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()

    def heard(entries: list[Entry]) -> None:
        for entry in entries:
            body = unpack(entry)
            if isinstance(body, EngineReady):
                ready.set_result(body)

    settings = WorkerSettings(
        name="w1",
        router=with_key("tcp://127.0.0.1:1", router),
        engine="fake",
        relay="tcp://127.0.0.1:0",
        security=keys.server_settings("w1"),
    )
    host = await HostProcess.start(settings, heard)
    async with asyncio.timeout(START_S):
        endpoint = (await ready).bulk
        async with BulkLink(endpoint, dialer_of(keys.client_settings("w2"))) as worker:
            with pytest.raises(EngineFailed) as caught:
                await worker.ask("push_chunk", PushChunk("default", 1, 0, b"x"))
        assert caught.value.code == "forbidden"
        await host.stop()
        assert (await host.wait()).reason.endswith("code 0")


async def test_a_relay_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    async def open_and_close(name: str) -> int:
        async with (
            open_relay(f"ipc://{tmp_path}/{name}", None) as relay,
            BulkLink(relay.bulk) as link,
        ):
            with pytest.raises(EngineFailed):
                await link.ask("push_chunk", PullChunk("default", 1, 0, 1))
        return n_held("fd")

    before = await open_and_close("first")
    for i in range(N_ROUNDS):
        await open_and_close(f"r{i}")
    async with asyncio.timeout(DEADLINE_S):
        while n_held("fd") >= before + N_ROUNDS // 2:  # noqa: ASYNC110
            await asyncio.sleep(PACE_S)  # libzmq closes the last ones in its own time


async def test_a_worker_says_where_it_serves_and_does_until_it_leaves(
    tmp_path: Path, seed: int
) -> None:
    model = fake_model(seed)
    endpoint = f"ipc://{tmp_path}/bulk-of-w0"
    async with (
        family(tmp_path, model) as here,
        worker_process(tmp_path, relay=endpoint) as (router, process),
    ):
        await router.joined()
        assert router.hello is not None
        assert router.hello.worker is not None
        assert router.hello.worker.bulk == endpoint
        router.send("prepare_update", "c/1", pack(here.ask()))
        assert (await router.ending("c/1")).kind == "finished"
        async with BulkLink(endpoint) as child, asyncio.timeout(DEADLINE_S):
            chunk = await child.ask("pull_chunk", PullChunk("default", here.version, 0, 100))
        assert chunk == Chunk(0, (await here.content())[:100].tobytes())
        process.terminate()
        async with asyncio.timeout(DEADLINE_S):
            assert await process.wait() == 0


async def test_a_version_that_arrives_twice_is_served_from_where_it_was_proven(
    tmp_path: Path, seed: int
) -> None:
    async with (
        family(tmp_path, model_of(seed, 1)) as here,
        open_relay(f"ipc://{tmp_path}/r", None) as relay,
        BulkLink(relay.bulk) as child,
        asyncio.timeout(DEADLINE_S),
    ):
        manifest, first = await here.manifest(), await here.content()
        second = np.zeros_like(first)
        relay.begin(manifest, first)
        relay.begin(manifest, second)
        relay.proven(manifest, first, range(len(manifest.tensors)))
        ask = PullChunk("default", here.version, 0, 4096)
        waiting = asyncio.create_task(child.ask("pull_chunk", ask))
        assert await child.ask("pull_manifest", PullManifest("default", here.version)) == manifest
        assert not waiting.done()
        second[:] = first
        relay.proven(manifest, second, range(len(manifest.tensors)))
        assert await waiting == Chunk(0, first[:4096].tobytes())
