"""The bus: `RolloutClient`, a router process, and workers that are members but have no engine.

A command is a `generate` of 32 tokens, and its reply 16 tokens with logprobs: about 200 bytes each
way, as the other paths carry. `ports` as role takes the place of the client: it sends and receives
the same kinds of entries by the port that a client uses, and does nothing else. What lies between
the two is what the client does for its caller.
"""

import asyncio
import secrets
import sys
from random import Random

import numpy as np
import uvloop
import xxhash

import rolloutbus
from benchmarks.command_peers.closed_loop import Ask, measure, say_ready, workers
from benchmarks.loop_load import BusClient
from benchmarks.member_shell import MemberShell
from benchmarks.side_processes import router_process
from rolloutbus import SamplingParams
from rolloutbus.bus.actor.process import die_with_parent
from rolloutbus.bus.membership.core import MemberCore, MemberIdentity
from rolloutbus.bus.membership.deliveries import Execute, MemberEffect
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.entry import RequestId
from rolloutbus.bus.wire.messages.generation import Generated
from rolloutbus.bus.wire.messages.membership import WorkerFacts

SLOTS = 1024
N_TOKENS = 16
PROMPT = np.arange(1, 33, dtype=np.int32)
SAMPLING = SamplingParams(max_new_tokens=N_TOKENS, sampling_seed=1, ignore_eos=True)
TOKENS = np.arange(N_TOKENS, dtype="<i4").tobytes()
RESULT = Generated(
    tokens=TOKENS,
    logprobs=np.zeros(N_TOKENS, "<f4").tobytes(),
    versions=[(0, N_TOKENS)],
    finish_reason="length",
    digest=xxhash.xxh3_64_intdigest(TOKENS),
    n_prompt_tokens=len(PROMPT),
)
DEADLINE_S = 60.0


class Worker:
    """A member that finishes each command as soon as it arrives."""

    def __init__(self, endpoint: str, name: str) -> None:
        identity = MemberIdentity("worker", name, secrets.token_hex(16))
        core = MemberCore(identity, LeaseSettings(), Random())
        self._shell = MemberShell(endpoint, core, self._carry_out)
        self.welcomed = self._shell.welcomed
        self._shell.go_online(WorkerFacts("default", "", SLOTS, 4096, 32_000, "fake", ["generate"]))

    def _carry_out(self, effect: MemberEffect) -> None:
        if isinstance(effect, Execute):
            entry = effect.entry
            self._shell.finished((RequestId(entry.rid), entry.attempt), RESULT)


async def _worker(endpoint: str, number: str) -> None:
    worker = Worker(endpoint, f"w{number}")
    await worker.welcomed.wait()
    say_ready()
    await asyncio.Event().wait()


async def _client(n_workers: int) -> None:
    async with (
        router_process() as (_, frontend, backend),
        workers("bus", n_workers, backend),
        rolloutbus.connect(frontend, name="benchmark") as client,
    ):

        async def ask() -> None:
            rollout = await client.generate(PROMPT, SAMPLING, deadline_s=DEADLINE_S)
            if len(rollout.tokens) != N_TOKENS:
                raise ValueError(f"{len(rollout.tokens)} tokens, and not {N_TOKENS}")

        await measure(ask)


async def _ports(n_workers: int) -> None:
    async with router_process() as (_, frontend, backend), workers("bus", n_workers, backend):
        await measure(_port_of(frontend))


def _port_of(frontend: str) -> Ask:
    """The port alone: entries out, entries in, a future for each."""
    client = BusClient(frontend, "benchmark")
    futures: dict[int, asyncio.Future[None]] = {}
    loop = asyncio.get_running_loop()
    n_asked = 0

    def answered(number: int) -> None:
        future = futures.pop(number)
        if not future.done():  # its caller has not left
            future.set_result(None)

    async def ask() -> None:
        nonlocal n_asked
        n_asked += 1
        future = futures[n_asked] = loop.create_future()
        client.ask(n_asked)
        await future

    client.on_reply = answered
    return ask


if __name__ == "__main__":
    die_with_parent()
    match sys.argv[1:]:
        case ["client", n_workers]:
            uvloop.run(_client(int(n_workers)))
        case ["ports", n_workers]:
            uvloop.run(_ports(int(n_workers)))
        case ["worker", endpoint, number]:
            uvloop.run(_worker(endpoint, number))
        case wrong:
            sys.exit(f"no such role: {wrong}")
