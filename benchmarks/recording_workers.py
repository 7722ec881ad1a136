"""Fake workers of the recording benchmark: real members and publishers of random tokens.

Each request gets a token per step, in columns as of a real engine's step, and a result at its end.
Real engines cost more: these leave the machine to the bus, so that it can carry what is asked.

    python -m benchmarks.recording_workers ENDPOINT FIRST COUNT STEP_MS
"""

import asyncio
import json
import secrets
import sys
from random import Random
from typing import cast

import numpy as np
import uvloop
import xxhash

from benchmarks.member_shell import MemberShell
from benchmarks.side_processes import ANY_PORT
from rolloutbus.bus.actor.process import die_with_parent
from rolloutbus.bus.membership.core import MemberCore, MemberIdentity, Vitals
from rolloutbus.bus.membership.deliveries import Execute, MemberEffect, StopSilently, StopWork
from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.transport.zmq_topics import PubPort
from rolloutbus.bus.wire.codec import pack, topic_of, unpack
from rolloutbus.bus.wire.entry import Attempt, Entry, RequestId
from rolloutbus.bus.wire.messages.generation import Deltas, FinishReason, Generate, Generated
from rolloutbus.bus.wire.messages.membership import WorkerFacts

SLOTS = 256
HAT_BYTES = 4 * 65_536
"""Where the tokens come from."""
VERSION = 1

Key = tuple[str, Attempt]


class _Topic:
    """Requests of one client, in columns."""

    def __init__(self, client: str) -> None:
        self.topic = topic_of(client)
        self.keys: list[Key] = []
        self.n_tokens: list[int] = []
        self.ends: list[int] = []

    def add(self, key: Key, end: int) -> None:
        self.keys.append(key)
        self.n_tokens.append(0)
        self.ends.append(end)

    def drop(self, gone: set[Key]) -> None:
        kept = [row for row, key in enumerate(self.keys) if key not in gone]
        self.keys = [self.keys[row] for row in kept]
        self.n_tokens = [self.n_tokens[row] for row in kept]
        self.ends = [self.ends[row] for row in kept]


class FakeWorker:
    """One worker."""

    def __init__(self, endpoint: str, name: str, step_s: float) -> None:
        self._name, self._step_s = name, step_s
        self._loop = asyncio.get_running_loop()
        self._hat = np.random.default_rng(1).integers(0, 32_000, HAT_BYTES // 4, np.int32).tobytes()
        self._pub = PubPort(ANY_PORT)
        self._topics: dict[str, _Topic] = {}
        self._n_steps = self._n_tokens = 0
        identity = MemberIdentity("worker", name, secrets.token_hex(16))
        self._core = MemberCore(identity, LeaseSettings(), Random(), self._vitals)
        self._shell = MemberShell(endpoint, self._core, self._carry_out)
        self.welcomed = self._shell.welcomed
        stream = self._pub.endpoint
        self._shell.go_online(
            WorkerFacts("default", stream, SLOTS, 4096, 32_000, "fake", ["generate"])
        )
        self._step_at = self._loop.time()
        self._step()

    def _vitals(self) -> Vitals:
        return Vitals(steps=self._n_steps, free=SLOTS, n_tokens=self._n_tokens)

    def _carry_out(self, effect: MemberEffect) -> None:
        match effect:
            case Execute(entry):
                self._begin(entry)
            case StopSilently(keys):
                for topic in self._topics.values():
                    topic.drop({(str(rid), attempt) for rid, attempt in keys})
            case StopWork():
                self._topics.clear()
            case _:
                pass

    def _begin(self, entry: Entry) -> None:
        body = cast("Generate", unpack(entry))
        topic = self._topics.get(entry.route)
        if topic is None:
            topic = self._topics[entry.route] = _Topic(entry.route)
        topic.add((entry.rid, entry.attempt), body.sampling.max_new_tokens)

    def _step(self) -> None:
        # Late steps are made up for, as an engine's own pace does not depend on who listens.
        self._step_at += self._step_s
        self._loop.call_at(self._step_at, self._step)
        self._n_steps += 1
        for topic in self._topics.values():
            if topic.keys:
                self._publish(topic)

    def _publish(self, topic: _Topic) -> None:
        n_rows = len(topic.keys)
        start = 4 * (self._n_steps % 50_000)
        seqs = topic.n_tokens
        topic.n_tokens = [n + 1 for n in seqs]
        finishes: list[tuple[int, FinishReason]] = [
            (row, "length") for row, n in enumerate(topic.n_tokens) if n >= topic.ends[row]
        ]
        deltas = Deltas(
            rids=[rid for rid, _ in topic.keys],
            attempts=[attempt for _, attempt in topic.keys],
            seqs=seqs,
            counts=[1] * n_rows,
            tokens=self._hat[start : start + 4 * n_rows],
            logprobs=self._hat[start : start + 4 * n_rows],
            versions=[VERSION] * n_rows,
            finishes=finishes,
        )
        self._n_tokens += n_rows
        entry = Entry("deltas", epoch=self._core.epoch, route=self._name, body=pack(deltas))
        self._pub.publish(topic.topic, entry)
        if finishes:
            self._finish(topic, [row for row, _ in finishes])

    def _finish(self, topic: _Topic, rows: list[int]) -> None:
        ended = [(topic.keys[row], topic.ends[row]) for row in rows]
        topic.drop({key for key, _ in ended})
        for (rid, attempt), n_tokens in ended:
            tokens = self._hat[: 4 * n_tokens]
            digest = xxhash.xxh3_64_intdigest(tokens)
            result = Generated(tokens, tokens, [(VERSION, n_tokens)], "length", digest, 2)
            self._shell.finished((RequestId(rid), attempt), result)


async def serve(endpoint: str, first: int, count: int, step_ms: float) -> None:
    """Run all workers until the process is ended; prints a line when all are welcome."""
    workers = [FakeWorker(endpoint, f"w{first + i}", step_ms / 1000) for i in range(count)]
    for each in workers:
        await each.welcomed.wait()
    print(json.dumps({"ready": count}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    die_with_parent()
    endpoint, first, count, step_ms = sys.argv[1:]
    uvloop.run(serve(endpoint, int(first), int(count), float(step_ms)))
