"""What tests of a live fleet share: streams that can be observed, and waits with a deadline."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, TypeVar, Unpack

import msgspec
import numpy as np
import pytest

from rolloutbus import Fleet, Rollout, RolloutClient, SamplingParams, record
from rolloutbus.bus.actor.process import read_ready
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.messages.control import ServerFacts
from rolloutbus.engine_worker.engines.fake.engine import fake_logprob, prompt_digest, token_after
from rolloutbus.engine_worker.settings import HostSettings
from rolloutbus.errors import RolloutCancelled
from rolloutbus.launcher.plan import environment
from rolloutbus.trainer_adapter.client.asks import GenerateOptions, ask_of
from rolloutbus.types import Delta, FleetStatus, WorkerStatus

DEADLINE_S = 60.0
"""Of every wait; a busy machine needs a fraction of it."""
START_S = 3 * DEADLINE_S
"""Of a process until it serves: its imports are seconds of work, for which others compete."""
PACE_S = 0.02
"""Between two questions to the router: a status is an answer, not an event."""
STILL_S = 0.4
"""Many engine steps: whatever has not moved for so long does not move."""
ENDLESS = 24_000
"""Tokens of a rollout that is still under way whenever a test looks; it has to be cut."""
FAKE_SEED = 7
PATIENT = LeaseSettings(lease_s=30.0, holder_s=24.0, recovery_s=31.0)
"""Where no lease is to run out: a machine too busy for a heartbeat must not end one."""
UNHURRIED = LeaseSettings(lease_s=12.0, holder_s=9.6, recovery_s=12.5)
"""Where one is to run out, or a router to recover, but none because the machine is busy."""
PLAYED_ROUTER = LeaseSettings(lease_s=30.0, holder_s=24.0, recovery_s=31.0, silence_s=20.0)
"""For an actor whose router a test plays, which answers late, and says nothing a second time."""
STEADY_HOST = HostSettings(silent_s=30.0, give_up_s=60.0, wedged_s=120.0)
"""Where no engine host is to be left out of anything, or given up, because the machine is busy."""
PATIENT_HOST = HostSettings(give_up_s=60.0, wedged_s=120.0)
"""Where a test stops an engine host that is not to be given up, however long that takes."""

Found = TypeVar("Found")


class Changes:
    """Wakes the tasks that wait for a condition, so that they check it again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Let each waiting task check its condition."""
        self._event.set()

    async def until(self, look: Callable[[], Found], deadline_s: float = DEADLINE_S) -> Found:
        """Wait until a look, now or at any news, finds something; what that is."""
        async with asyncio.timeout(deadline_s):
            while not (found := look()):
                self._event.clear()
                await self._event.wait()
            return found


class Streamed:
    """A stream under way, its deltas so far and the rollout that they lead to."""

    def __init__(
        self,
        client: RolloutClient,
        prompt: Sequence[int],
        sampling: SamplingParams,
        **options: Unpack[GenerateOptions],
    ) -> None:
        ask = ask_of(prompt, sampling, stream=True, **options)
        deadline_s = options.get("deadline_s", DEADLINE_S)
        self._client = client
        self.rid, self._future, self._inbox = client.connection.submit_stream(ask, deadline_s)
        self.deltas: list[Delta] = []
        self._changes = Changes()
        self._reader = asyncio.create_task(self._read())

    @property
    def tokens(self) -> list[int]:
        """What came so far, in order of arrival."""
        return [int(token) for delta in self.deltas for token in delta.tokens]

    @property
    def logprobs(self) -> list[float]:
        return [float(value) for delta in self.deltas for value in delta.logprobs]

    @property
    def worker(self) -> str:
        """Who sampled the last token."""
        return self.deltas[-1].worker

    @property
    def is_contiguous(self) -> bool:
        """Each delta begins where the one before ended."""
        ends = np.cumsum([0, *(len(delta.tokens) for delta in self.deltas)])
        return [delta.start for delta in self.deltas] == ends[:-1].tolist()

    async def reached(self, n_tokens: int) -> None:
        """Wait until so many tokens came."""
        await self.seen(lambda: len(self.tokens) >= n_tokens)

    async def grown_by(self, n_tokens: int) -> None:
        """Wait until so many more tokens came."""
        await self.reached(len(self.tokens) + n_tokens)

    async def seen(self, is_so: Callable[[], bool]) -> None:
        """Wait until `is_so`, judged after each delta."""

        def look() -> bool:
            if is_so():
                return True
            assert not self._reader.done(), f"the stream ended early: {self._future}"
            return False

        await self._changes.until(look)

    async def stands_still(self) -> bool:
        """Whether it stops growing; what is on its way may still come."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while await self._grows():
                    pass
        except TimeoutError:
            return False
        return not self._reader.done()

    async def cut(self) -> Rollout:
        """Abort it; what it came to, which is no less than what was streamed."""
        await self._client.abort([self.rid])
        return await self.cancelled()

    async def cancelled(self) -> Rollout:
        """What it came to when somebody aborted it."""
        with pytest.raises(RolloutCancelled) as caught:
            await self.rollout()
        partial = caught.value.partial
        assert partial.tokens[: len(self.tokens)].tolist() == self.tokens
        assert partial.logprobs[: len(self.logprobs)].tolist() == self.logprobs
        assert (partial.rid, partial.finish_reason) == (self.rid, "abort")
        return partial

    async def rollout(self, deadline_s: float = DEADLINE_S) -> Rollout:
        """Its result, once the stream has ended."""
        async with asyncio.timeout(deadline_s):
            await self._reader
            result = await self._future
        assert isinstance(result, Rollout)
        return result

    async def _grows(self) -> bool:
        n_tokens = len(self.tokens)
        try:
            async with asyncio.timeout(STILL_S):
                await self.seen(lambda: len(self.tokens) > n_tokens)
        except TimeoutError:
            return False
        return True

    async def _read(self) -> None:
        async for delta in self._inbox:
            self.deltas.append(delta)
            self._changes.notify()
        self._changes.notify()


def quiet_addresses(n: int) -> list[str]:
    """Places on the loopback that stay free while nobody listens: a router may come back to its.

    Their ports are none of those that the system hands out by itself, to servers and clients alike.
    """
    handed_out = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    first, last = map(int, handed_out.split())
    others = [port for port in range(10_000, 65_536) if not first <= port <= last]
    random.SystemRandom().shuffle(others)  # those of another test, or of another run, are others
    found: list[str] = []
    while len(found) < n:
        port = others.pop()
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(f"tcp://127.0.0.1:{port}")
    return found


async def status_when(
    client: RolloutClient,
    is_so: Callable[[FleetStatus], bool],
    deadline_s: float = DEADLINE_S,
) -> FleetStatus:
    """The first status of which `is_so` holds; where engines start meanwhile, give it START_S."""
    status = await client.status()
    try:
        async with asyncio.timeout(deadline_s):
            while not is_so(status):
                await asyncio.sleep(PACE_S)  # the router tells nobody when it changes
                status = await client.status()
    except TimeoutError:
        raise AssertionError(f"never came true; last seen: {status}") from None
    return status


async def facts_when(
    client: RolloutClient, is_so: Callable[[dict[str, ServerFacts]], bool]
) -> dict[str, ServerFacts]:
    """What the workers themselves say, once `is_so` holds of it."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            result = await client.server_info(check=False)
            facts = {
                name: each
                for name, each in result.by_worker.items()
                if isinstance(each, ServerFacts)
            }
            if is_so(facts):
                return facts
            await asyncio.sleep(PACE_S)  # workers tell nobody when they change


def worker_in(status: FleetStatus, name: str) -> WorkerStatus | None:
    """A worker's row in the router's table; None if it is not there."""
    return next((worker for worker in status.workers if worker.name == name), None)


def fake_sampling(n_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=n_tokens, ignore_eos=True, sampling_seed=FAKE_SEED)


def assert_fake_rollout(
    prompt: Sequence[int], rollout: Rollout, n_tokens: int, *, row: int = 0
) -> None:
    """Every token is the one that its prompt, seed, index and version give.

    Args:
        prompt: what was continued.
        rollout: what came.
        n_tokens: that were asked for.
        row: of its batch, by which its seed differs from those of the others.
    """
    digest = prompt_digest(np.array(prompt, np.int32).tobytes())
    versions = rollout.token_versions.tolist()
    seed = FAKE_SEED + row
    wanted = [token_after(digest, seed, i, version) for i, version in enumerate(versions)]
    assert len(wanted) == n_tokens
    assert rollout.tokens.tolist() == wanted
    assert rollout.logprobs.tolist() == [fake_logprob(token) for token in wanted]


def n_held(kind: Literal["fd", "task"], pid: int | str = "self") -> int:
    """Descriptors or threads of a process, those of libraries among them."""
    return sum(1 for _ in Path(f"/proc/{pid}/{kind}").iterdir())


async def live_and_die(script: Path, address: str) -> None:
    """Run this client until it says that it has begun its rollouts, then kill it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), address, stdout=asyncio.subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            assert await process.stdout.readline() == b"running\n"
    finally:
        process.kill()
        await process.wait()


async def serves_at(process: Process) -> dict[str, str]:
    """Wait until an actor says on its stdout that it serves; its endpoints.

    It may have something else to say before, such as that its router does not answer yet.
    """
    assert process.stdout is not None
    said: list[bytes] = []
    async with asyncio.timeout(START_S):
        while (endpoints := read_ready(line := await process.stdout.readline())) is None:
            said.append(line)
            assert line, f"it ended before it was ready: {said}"
    return endpoints


async def process_ends(pid: int) -> None:
    """Wait until a process is gone: it was told to, or killed, but that takes effect later."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


@asynccontextmanager
async def recorded(fleet: Fleet, journal: Path) -> AsyncGenerator[None]:
    """What is routed in this context is in the journal afterwards; the fleet needs `tap=True`."""
    async with record(fleet.address, journal) as recorder:
        await recorder.caught_up(DEADLINE_S)
        yield
        await recorder.caught_up(DEADLINE_S)


@asynccontextmanager
async def another_worker(
    fleet: Fleet, client: RolloutClient, name: str, **settings: object
) -> AsyncGenerator[None]:
    """A worker that takes requests beside those of a fleet; `settings` of `WorkerSettings`.

    Its operator lets it read no files.
    """
    described = {"name": name, "router": fleet.backend, "lease": PATIENT, **settings}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolloutbus.engine_worker"),
        f"--settings-json={msgspec.json.encode(described).decode()}",
        stdout=asyncio.subprocess.DEVNULL,
        env=environment(),
    )
    try:
        await status_when(
            client,
            lambda status: (
                all(not each.blocked_by for each in status.workers)
                and worker_in(status, name) is not None
            ),
            START_S,
        )
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), DEADLINE_S)
    await status_when(client, lambda status: worker_in(status, name) is None)
