"""How the ranks of a `collective` offer find out that all of them are there, before they begin.

Spec: docs/protocol.md, "Collective". The rendezvous is a key-value store that the trainer serves
(a TCPStore of `torch.distributed`, which is not imported here).
"""

from typing import Annotated

import msgspec

from rolloutbus.bus.wire.limits import MAX_MEMBERS, Sentence

TIMEOUT = "timeout_ms"
"""Written by the trainer before it offers: how long ranks may take to come, and then to receive."""
WORLD = "world"
"""Ranks in all, in decimal: written by every worker, first of all."""
GO = "go"
"""Written by the trainer: empty, or why nothing will be sent."""
END = "end"
"""Written by the trainer: all have the bytes, or it gave up; links may be closed."""
GROUP = "group"
"""Prefix of the process group's own keys."""


MAX_TIMEOUT_MS = 86_400_000


class RankReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a worker writes under `joined_key`, and under `done_key`."""

    problem: Sentence = ""
    """Why it does not take part, or why it could not use what it got."""
    gpu: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """UUID of the GPU it receives on; nccl cannot have two ranks on one."""


class BadReport(ValueError):
    """A value in the rendezvous is not what the protocol says."""


def seat_key(rank: int) -> str:
    """Counts who took rank `rank`: a second one has to go."""
    return f"seat/{rank}"


def joined_key(rank: int) -> str:
    """Rank `rank` is there."""
    return f"joined/{rank}"


def done_key(rank: int) -> str:
    """Rank `rank` has received and verified everything, or has failed."""
    return f"done/{rank}"


def write_report(report: RankReport) -> str:
    """As a value."""
    return msgspec.json.encode(report).decode()


def read_report(value: bytes) -> RankReport:
    """Raises BadReport."""
    try:
        return msgspec.json.decode(value, type=RankReport)
    except msgspec.MsgspecError as error:
        raise BadReport(f"a report in the rendezvous is not one: {error}") from error


def read_timeout_s(value: bytes) -> float:
    """Seconds. Raises BadReport."""
    if not value.isdigit() or not 0 < (timeout_ms := int(value[:12])) <= MAX_TIMEOUT_MS:
        raise BadReport(f"a timeout of {value[:40]!r} ms")
    return timeout_ms / 1e3


def read_world(value: bytes) -> int:
    """Raises BadReport."""
    if not value.isdigit() or not 1 < (world := int(value[:9])) <= MAX_MEMBERS:
        raise BadReport(f"a world of {value[:40]!r} ranks")
    return world


def why_not(trainer_gpu: str, reports: list[RankReport]) -> str:
    """Why a group of these cannot begin; empty if it can. `reports` by rank, from 1."""
    for rank, report in enumerate(reports, 1):
        if report.problem:
            return f"rank {rank}: {report.problem}"
    gpus = [gpu for gpu in (trainer_gpu, *(each.gpu for each in reports)) if gpu]
    shared = next((gpu for gpu in gpus if gpus.count(gpu) > 1), "")
    return f"two ranks on GPU {shared}" if shared else ""
