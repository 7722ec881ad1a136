"""A guarded fleet of real processes: who may do what in it, and who may do nothing."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import torch

import rolloutbus
from rolloutbus import Fleet, RolloutClient, SamplingParams, subscribe
from rolloutbus.bus.security.key_files import read_key_pair
from rolloutbus.bus.security.zmq_curve import Dialer, dialer_of
from rolloutbus.bus.transport.endpoints import split_key, with_key
from rolloutbus.bus.transport.zmq_ports import DealerPort
from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.errors import PeerLost, Refused
from rolloutbus.bus.wire.messages.generation import Abort
from rolloutbus.bus.wire.messages.membership import Heartbeat, Hello, WorkerFacts
from rolloutbus.bus.wire.messages.weights import PullManifest
from rolloutbus.events import Tokens
from rolloutbus.launcher.plan import environment
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from rolloutbus.trainer_adapter.publisher.weight_writer import WeightWriter
from rolloutbus.types import Subscriber
from tests.integration.key_directory import KeyDirectory
from tests.integration.live_fleet import (
    DEADLINE_S,
    ENDLESS,
    PATIENT,
    START_S,
    STEADY_HOST,
    Changes,
    Streamed,
    assert_fake_rollout,
    fake_sampling,
    status_when,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2 * START_S)]

PROMPT = [1, 2, 3]
NEVER_S = 1.5
"""Long enough for a client that may come in; one that may not is given no longer."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """One worker and a store, with keys."""
    directory = tmp_path_factory.mktemp("keys")
    running = rolloutbus.up(
        workers=1,
        engine="fake",
        engine_options={"step_s": 0.005},
        secure=directory,
        lease=PATIENT,
        host=STEADY_HOST,
    )
    async with running:
        yield running


@pytest.fixture
def keys(fleet: Fleet) -> KeyDirectory:
    """The fleet's own keys, to add to."""
    return KeyDirectory(Path(fleet.key_file).parent)


@pytest_asyncio.fixture(loop_scope="module")
async def admin(fleet: Fleet) -> AsyncIterator[RolloutClient]:
    async with rolloutbus.connect(fleet.address, key_file=fleet.key_file) as client:
        yield client


def settings_of(keys: KeyDirectory, fleet: Fleet, name: str) -> ClientSettings:
    security = keys.client_settings(name)
    return ClientSettings(name, fleet.address, security=security, connect_timeout_s=DEADLINE_S)


async def is_kept_out(settings: ClientSettings) -> bool:
    client = RolloutClient(msgspec.structs.replace(settings, connect_timeout_s=NEVER_S))
    try:
        async with client:
            return False
    except PeerLost:
        return True


def shown_by(pids: list[int], run_dir: Path) -> list[bytes]:
    """What others may see of processes, and all files of their run directory."""
    files = [Path(f"/proc/{pid}/{name}") for pid in pids for name in ("cmdline", "environ")]
    files += [file for file in run_dir.rglob("*") if file.is_file()]
    return [file.read_bytes() for file in files]


class RawLink:
    """A connection with a key, and whatever a test says on it."""

    def __init__(self, endpoint: str, dialer: Dialer | None) -> None:
        self.entries: list[Entry] = []
        self._changes = Changes()
        self.gone = asyncio.Event()
        self._port = DealerPort(endpoint, self._arrived, self._ended, dialer=dialer)
        self.send = self._port.send
        self.close = self._port.close

    async def heard(self, kind: str) -> Entry:
        found = await self._changes.until(lambda: [e for e in self.entries if e.kind == kind])
        return found[0]

    async def is_answered_or_gone(self) -> None:
        """Wait until something was said on it, or it has ended."""
        await self._changes.until(lambda: self.entries or self.gone.is_set())

    async def is_dropped_unheard(self) -> bool:
        """Whether the connection ends, and nothing was said on it."""
        async with asyncio.timeout(DEADLINE_S):
            await self.gone.wait()
        self.close()
        return not self.entries

    def _arrived(self, entries: list[Entry]) -> None:
        self.entries += entries
        self._changes.notify()

    def _ended(self) -> None:
        self.gone.set()
        self._changes.notify()


@pytest.mark.asyncio(loop_scope="module")
async def test_guarded_fleet_generates_streams_and_is_nowhere_without_keys(
    fleet: Fleet, admin: RolloutClient
) -> None:
    streamed = Streamed(admin, PROMPT, fake_sampling(64))
    assert_fake_rollout(PROMPT, await streamed.rollout(), 64)
    assert streamed.tokens == (await streamed.rollout()).tokens.tolist()
    members = admin.connection.members
    served = [fleet.address, fleet.backend, admin.bulk, *(each.stream for each in members)]
    assert len(served) == 4
    for endpoint in served:
        address, key = split_key(endpoint)
        assert address.startswith("tcp://")
        assert key


@pytest.mark.asyncio(loop_scope="module")
async def test_secrets_are_in_no_argument_environment_settings_file_or_log(
    fleet: Fleet, keys: KeyDirectory
) -> None:
    secrets = [read_key_pair(file).reveal() for file in keys.directory.glob("*.key")]
    assert len(secrets) >= 4
    pids = [*fleet.pids.values(), *fleet.host_pids("w0")]
    for secret in secrets:
        for text in shown_by(pids, fleet.run_dir):
            assert secret not in text
            assert secret.hex().encode() not in text


@pytest.mark.asyncio(loop_scope="module")
async def test_unknown_key_no_key_and_wrong_server_key_are_kept_out(
    fleet: Fleet, keys: KeyDirectory, admin: RolloutClient
) -> None:
    keys.make_unlisted("eve")
    address, _ = split_key(fleet.address)
    assert await is_kept_out(settings_of(keys, fleet, "eve"))
    assert await is_kept_out(ClientSettings("plain", address))
    impostor = with_key(address, "00" * 31 + "09")
    operator = settings_of(keys, fleet, "operator")
    assert await is_kept_out(msgspec.structs.replace(operator, router=impostor))
    assert (await admin.status()).workers


async def _first_tokens(events: Subscriber) -> Tokens:
    async for event in events:
        if isinstance(event, Tokens):
            return event
    pytest.fail("the subscriber has ended")


@pytest.mark.asyncio(loop_scope="module")
async def test_subscriber_sees_the_fleet_and_its_streams_but_generates_nothing(
    fleet: Fleet, keys: KeyDirectory, admin: RolloutClient
) -> None:
    keys.add("watcher", "subscriber")
    settings = settings_of(keys, fleet, "watcher")
    async with RolloutClient(settings) as client:
        assert (await client.status()).workers[0].name == "w0"
        with pytest.raises(Refused) as refused:
            await client.generate(PROMPT, SamplingParams(max_new_tokens=1))
        assert refused.value.code == "forbidden"
        with pytest.raises(Refused, match="forbidden"):
            await client.pause()
    async with subscribe(fleet.address, key_file=keys.file("watcher")) as events:
        reading = asyncio.ensure_future(_first_tokens(events))
        async with asyncio.timeout(DEADLINE_S):
            while not reading.done():  # a subscription is no event for its publisher
                await admin.generate(PROMPT, fake_sampling(4))
    assert reading.result().worker == "w0"


@pytest.mark.asyncio(loop_scope="module")
async def test_client_is_no_worker_and_takes_no_other_name(
    fleet: Fleet, keys: KeyDirectory
) -> None:
    keys.add("carl", "client")
    made = dialer_of(keys.client_settings("carl"))
    assert made is not None
    stream = with_key("tcp://127.0.0.1:1", read_key_pair(keys.file("carl")).public)
    facts = WorkerFacts("default", stream, 4, 4096, 100, "fake", [])
    hellos = [
        Hello("worker", "w0", "c" * 32, "c" * 32 + ".1", worker=facts),
        Hello("client", "operator", "c" * 32),
        Hello("client", "carl2", "c" * 32),
    ]
    for hello in hellos:
        link = RawLink(fleet.address, made)
        async with asyncio.timeout(DEADLINE_S):
            while not link.entries:  # the allow-list is looked at twice a second
                link.close()
                link = RawLink(fleet.address, made)
                link.send(Entry("hello", body=pack(hello)))
                await link.is_answered_or_gone()
        assert b"forbidden" in bytes((await link.heard("dismissed")).body)
        link.close()
    backend = RawLink(fleet.backend, made)
    backend.send(Entry("beat", body=pack(Heartbeat(1))))
    assert await backend.is_dropped_unheard()


@pytest.mark.asyncio(loop_scope="module")
async def test_client_cannot_use_the_rid_of_another(
    fleet: Fleet, keys: KeyDirectory, admin: RolloutClient
) -> None:
    keys.add("dora", "client")
    settings = settings_of(keys, fleet, "dora")
    running = Streamed(admin, PROMPT, fake_sampling(ENDLESS), deadline_s=START_S)
    await running.reached(1)
    async with RolloutClient(settings) as client:
        with pytest.raises(Refused, match="unknown_request"):
            await client.abort(running.rid)
    made = dialer_of(keys.client_settings("dora"))
    link = RawLink(fleet.address, made)
    link.send(Entry("hello", body=pack(Hello("client", "dora", "d" * 32))))
    await link.heard("welcome")
    link.send(Entry("abort", "dora/1", deadline_ms=9000, body=pack(Abort([running.rid]))))
    await link.heard("finished")
    link.close()
    await running.grown_by(1)
    partial = await running.cut()
    assert_fake_rollout(PROMPT, partial, len(partial.tokens))


@pytest.mark.asyncio(loop_scope="module")
async def test_weights_cross_the_guarded_bulk_socket_and_clients_do_not(
    keys: KeyDirectory, admin: RolloutClient
) -> None:
    publisher = rolloutbus.WeightPublisher(admin, writer=WeightWriter(may_map=False))
    tensors = {"embed.weight": torch.ones(8, 4), "head.weight": torch.ones(4)}
    published = await publisher.publish(tensors, require="all", deadline_s=DEADLINE_S)
    assert published.stall_ms.keys() == {"w0"}
    rollout = await admin.generate(PROMPT, fake_sampling(8), versions="latest")
    assert set(rollout.token_versions.tolist()) == {published.version}
    report = await admin.check_weights()
    assert report.is_ok
    assert report.by_worker["w0"].is_in_store
    keys.add("hal", "client")
    link = RawLink(admin.bulk, dialer_of(keys.client_settings("hal")))
    ask = PullManifest(policy="default", version=published.version)
    link.send(Entry("pull_manifest", "1", body=pack(ask)))
    assert await link.is_dropped_unheard()


@pytest.mark.asyncio(loop_scope="module")
async def test_revoked_client_is_dismissed_in_the_middle_of_its_work(
    fleet: Fleet, keys: KeyDirectory, admin: RolloutClient
) -> None:
    keys.add("gus", "client")
    settings = settings_of(keys, fleet, "gus")
    async with RolloutClient(settings) as client:
        streamed = Streamed(client, PROMPT, fake_sampling(ENDLESS), deadline_s=START_S)
        await streamed.reached(1)
        keys.revoke("gus")
        with pytest.raises(PeerLost, match="dismissed"):
            await streamed.rollout()
    assert await is_kept_out(settings)
    await status_when(admin, lambda status: status.n_running == 0)
    assert_fake_rollout(PROMPT, await admin.generate(PROMPT, fake_sampling(16)), 16)


@pytest.mark.parametrize(
    "command",
    [
        "router --frontend tcp://0.0.0.0:7777",
        "router --backend tcp://*:7778",
        "store --directory {0} --bulk tcp://10.0.0.1:0",
        "store --directory {0} --router tcp://10.0.0.1:7778",
        "worker --name w0 --engine fake --stream tcp://10.0.0.1:0",
        "worker --name w0 --engine fake --router tcp://10.0.0.1:7778",
        "status --address tcp://10.0.0.1:7777",
        "up --engine fake --address tcp://10.0.0.1:7777",
    ],
)
async def test_other_machines_without_keys_are_refused_in_one_line_with_status_2(
    tmp_path: Path, command: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rolloutbus.cli.main",
        *command.format(tmp_path).split(),
        env=environment(),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(START_S):
        _, said = await process.communicate()
    assert process.returncode == 2, said
    assert re.fullmatch(r"error: tcp://\S+ is beyond this machine: [^\n]+\n", said.decode())
