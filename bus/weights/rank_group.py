"""Collective transport: how the ranks meet, and broadcasts from rank 0 by gloo or nccl.

The rendezvous is a key-value store that the trainer serves (a TCPStore). The program around it may
have process groups already, so torch's global default group is never touched. `torch.distributed`
is given and not imported: the bus does not depend on it. Spec: docs/protocol.md, "Collective".
"""

import os
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import msgspec

from rolloutbus.bus.wire.limits import MAX_MEMBERS, Sentence

TIMEOUT = "timeout_ms"
"""Written by the trainer before it offers: how long ranks may take to come, and then to receive."""
WORLD = "world"
"""Ranks in all, in decimal: written by every worker, first of all."""
GO = "go"
"""Written by the trainer: empty, or why nothing will be sent."""
GROUP_NAME = "group_name"
"""Written by the trainer before an empty `GO`: the group that all of them have, or a new one."""
END = "end"
"""Written by the trainer: all have the bytes, or it gave up; links may be closed."""
GROUP = "group"
"""Prefix of a new process group's own keys."""


MAX_TIMEOUT_MS = 86_400_000


class RankReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A worker's value under `joined_key` and `done_key`."""

    problem: Sentence = ""
    """Why it does not take part, or why it could not use what it got."""
    gpu: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """UUID of the GPU it receives on; nccl cannot have two ranks on one."""
    group: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Name of the group that it has kept, in which it has the same rank of as many; empty: none."""


class BadReport(ValueError):
    """A value in the rendezvous breaks the protocol."""


def seat_key(rank: int) -> str:
    """Key of a counter: a second process that takes rank `rank` has to leave."""
    return f"seat/{rank}"


def joined_key(rank: int) -> str:
    """Key that says: rank `rank` has joined."""
    return f"joined/{rank}"


def done_key(rank: int) -> str:
    """Key that says: rank `rank` has received and verified everything, or has failed."""
    return f"done/{rank}"


def write_report(report: RankReport) -> str:
    """The report as a value of the rendezvous."""
    return msgspec.json.encode(report).decode()


def read_report(value: bytes) -> RankReport:
    """The report in a value. Raises BadReport."""
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
    """Number of ranks. Raises BadReport."""
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


_POLL_S = 0.0005
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place in a group."""

    backend: str
    """`gloo` or `nccl`."""
    rank: int
    world: int
    address: str
    """Of this host, as the other ranks reach it: where gloo listens."""
    timeout_s: float
    """For the group to come together, and for the broadcast."""


class BrokenGroup(Exception):
    """A rank is missing, has died or is late; the group is of no use any more."""


class RankGroup:
    """Links to the other ranks, from construction to `close`; used by one thread at a time."""

    def __init__(self, distributed: Any, store: Any, seat: Seat, name: str) -> None:  # noqa: ANN401
        """Meet the other ranks in `store`, a store of `distributed` that outlives the group.

        Raises:
            BrokenGroup: they did not come in time.
        """
        own = distributed.PrefixStore(GROUP, store)
        self._distributed = distributed
        self._seat = seat
        self.name = name
        """The same at all ranks, and no other group's."""
        build = _gloo if seat.backend == "gloo" else _nccl
        try:
            self._group: Any = build(distributed, own, seat)
        except RuntimeError as error:
            raise BrokenGroup(first_line(error)) from None

    def has_seat(self, backend: str, rank: int, world: int) -> bool:
        """Whether this is that rank's end of a group of as many."""
        seat = self._seat
        return (seat.backend, seat.rank, seat.world) == (backend, rank, world)

    def broadcast(self, pieces: Sequence[Any]) -> None:
        """Rank 0's content of each tensor becomes everybody's.

        Raises:
            BrokenGroup: a rank has died, or is late.
        """
        options = self._distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        works = [self._group.broadcast([piece], options) for piece in pieces]
        problem = _wait(works, self._seat)
        # Each of them holds the links, and so would an error that remembers this frame.
        works.clear()
        if problem:
            raise BrokenGroup(problem)

    def close(self) -> None:
        """Close the links to the other ranks; a broadcast under way fails at each of them."""
        if self._group is not None and self._seat.backend == "nccl":
            self._group.abort()
        self._group = None


class KeptGroup:
    """Keeps the group of the last version for the next one; closed when the process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: list[RankGroup] = []
        """At most one."""
        weakref.finalize(self, _close_all, self._groups)

    def take(self) -> RankGroup | None:
        """The group, which belongs to the caller from now on; None: there is none."""
        with self._lock:
            return self._groups.pop() if self._groups else None

    def keep(self, group: RankGroup) -> None:
        """Keep this one, in which nothing has failed; close the other one, if there is any."""
        with self._lock:
            others, self._groups[:] = [*self._groups], [group]
        _close_all(others)

    def close(self) -> None:
        """Close the group, if there is any."""
        group = self.take()
        if group is not None:
            group.close()


def _close_all(groups: Sequence[RankGroup]) -> None:
    for each in groups:
        each.close()


def _wait(works: Sequence[Any], seat: Seat) -> str:
    """Wait until all is done; returns why it never will be, or nothing."""
    deadline_at = time.monotonic() + seat.timeout_s
    try:
        for work in works:
            # nccl's own wait looks every 10 ms only, and is as patient as its watchdog.
            while seat.backend == "nccl" and not work.is_completed():
                if time.monotonic() > deadline_at:
                    return f"the broadcast took more than {seat.timeout_s:g} s"
                time.sleep(_POLL_S)
            work.wait()
    except RuntimeError as error:
        return first_line(error)
    return ""


def first_line(error: BaseException) -> str:
    """First line of an error's message: torch appends its stack."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _gloo(distributed: Any, store: Any, seat: Seat) -> Any:  # noqa: ANN401
    kind = distributed.ProcessGroupGloo
    options = kind._Options()  # noqa: SLF001 - the only way to say where it listens
    options._timeout = timedelta(seconds=seat.timeout_s)  # noqa: SLF001
    options._devices = [kind.create_device(hostname=seat.address)]  # noqa: SLF001
    return kind(store, seat.rank, seat.world, options)


def _nccl(distributed: Any, store: Any, seat: Seat) -> Any:  # noqa: ANN401
    kind = distributed.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=seat.timeout_s)  # noqa: SLF001
    with _without_watchdog():
        return kind(store, seat.rank, seat.world, options)


@contextmanager
def _without_watchdog() -> Generator[None]:
    """Torch's watchdog thread would end the whole process when another rank dies.

    It is switched by a variable of the environment alone, which is read when a group is made.
    """
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before
