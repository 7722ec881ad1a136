"""What workers publish and say, made by hand for tests of what reads it."""

import numpy as np

from rolloutbus.bus.streams.tap import TapEvent
from rolloutbus.bus.wire.codec import pack, topic_of
from rolloutbus.bus.wire.entry import Attempt, Entry, Placement
from rolloutbus.bus.wire.messages.generation import (
    Deltas,
    FinishReason,
    Generate,
    Generated,
    Idle,
    Prefix,
    SamplingParams,
)
from rolloutbus.bus.wire.messages.membership import Member, Members
from rolloutbus.replay.journal.records import Stream, Tap, ToldRecord

CLIENT = "c"
TOPIC = topic_of(CLIENT)
MS = 1_000_000


def ints(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def floats(*numbers: float) -> bytes:
    return np.array(numbers, "<f4").tobytes()


def row(rid: str, attempt: Attempt, seq: int, *tokens: int, version: int = 0) -> Deltas:
    """One row; the logprob of token t is -t."""
    return Deltas(
        [rid], [attempt], [seq], [len(tokens)], ints(*tokens), floats(*(-t for t in tokens)),
        [version],
    )  # fmt: skip


def step(*rows: Deltas, finishes: list[tuple[int, FinishReason]] | None = None) -> Deltas:
    """Rows of one engine step."""
    return Deltas(
        [each.rids[0] for each in rows],
        [each.attempts[0] for each in rows],
        [each.seqs[0] for each in rows],
        [each.counts[0] for each in rows],
        b"".join(each.tokens for each in rows),
        b"".join(each.logprobs for each in rows),
        [each.versions[0] for each in rows],
        finishes or [],
    )


def published(body: Deltas | Idle, worker: str = "w0") -> Entry:
    kind = "deltas" if isinstance(body, Deltas) else "idle"
    return Entry(kind, epoch="e.1", route=worker, body=pack(body))


def stream(n: int, *bodies: Deltas | Idle, worker: str = "w0", at_ms: int = 0) -> Stream:
    return Stream(n, at_ms * MS, TOPIC, [published(body, worker) for body in bodies])


def tapped(n: int, event: TapEvent, *entries: Entry) -> Tap:
    return Tap(n, n * MS, event, n, 1.5, 1, CLIENT, list(entries))


def told(n: int, *members: Member) -> ToldRecord:
    return ToldRecord(n, n * MS, [Entry("members", body=pack(Members(list(members))))])


def asked(
    rid: str, sampling: SamplingParams | None = None, prefix: Prefix | None = None, attempt: int = 0
) -> Entry:
    """A generate: from its client, or with an attempt to a worker."""
    body = pack(Generate(ints(3, 1), sampling or SamplingParams(sampling_seed=4), prefix=prefix))
    if attempt:
        return Entry("generate", rid, (1, attempt), route=CLIENT, body=body)
    return Entry("generate", rid, place=Placement("p"), body=body)


def ended(rid: str, *tokens: int, kind: str = "finished", version: int = 0) -> Entry:
    result = Generated(
        ints(*tokens), floats(*(-t for t in tokens)), [(version, len(tokens))], "stop", 0, 2
    )
    return Entry(kind, rid, (1, 1), route="w0", body=pack(result))
