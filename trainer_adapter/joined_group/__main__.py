"""`python -m rolloutbus.trainer_adapter.joined_group INVITATION FD`: one rank of a trainer's group.

A process of its own, because everything of `torch.distributed` blocks, and its nccl ends the whole
process when another rank dies. It joins as SGLang's engines do, answers, and then receives what it
is told to, into memory whose descriptors come over the socket FD. It ends with its parent, with its
stdin, and when rank 0 has left.
"""

import mmap
import os
import select
import socket
import sys
import time
from datetime import timedelta
from typing import Any, TextIO, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rolloutbus.bus.actor.process import PARENT_VARIABLE, die_with_parent
from rolloutbus.bus.weights.rank_group import first_line
from rolloutbus.trainer_adapter.joined_group.orders import Answer, Invitation, Receive

_c10d: Any = distributed_c10d
"""Groups beside the default one are made by private functions of torch; trainers use the same."""
WATCH_S = 1.0
"""Between two looks whether rank 0 is still there."""
POLL_S = 0.0005
NO_GPU = (
    "this gateway sees no GPU, so it cannot join a group of the backend nccl: make the group with "
    "the backend gloo, or publish with a WeightPublisher, which sends from the trainer's own GPU"
)
FOREVER = timedelta(days=1)
"""Of operations of the group: who waits for this process ends it when it takes too long."""


class JoinedRank:
    """One rank of a group."""

    def __init__(self, invitation: Invitation) -> None:
        """Meet the other ranks.

        Raises:
            RuntimeError, ValueError: they did not come in time, or the group cannot be.
        """
        self._is_on_gpu = invitation.backend == "nccl"
        self._store, self._group = _joined(invitation)

    def receive(self, order: Receive, memory: int) -> None:
        """Take so many broadcasts of rank 0 into the file `memory`.

        Raises:
            RuntimeError: a rank is gone, or sent something else.
        """
        bucket = torch.frombuffer(mmap.mmap(memory, order.size_bytes), dtype=torch.uint8)
        for piece in order.pieces:
            dtype: torch.dtype = getattr(torch, piece.dtype)
            end = piece.start + piece.n_elements * dtype.itemsize
            place = bucket[piece.start : end].view(dtype)
            received = torch.empty_like(place, device="cuda") if self._is_on_gpu else place
            work = cast("Any", dist.broadcast(received, 0, self._group, async_op=True))
            if self._is_on_gpu:
                self._watch(work)
                place.copy_(received)
            work.wait()

    def _watch(self, work: Any) -> None:  # noqa: ANN401 - torch does not export its class
        """Wait for a broadcast while rank 0 is there: nccl itself waits for a dead one, too."""
        look_at = time.monotonic() + WATCH_S
        while not work.is_completed():
            time.sleep(POLL_S)
            if time.monotonic() > look_at:
                self.require_rank_0()
                look_at += WATCH_S

    def require_rank_0(self) -> None:
        """Raises RuntimeError: its store is gone, and so is the group."""
        self._store.check(["rolloutbus"])


def _joined(invitation: Invitation) -> tuple[Any, dist.ProcessGroup]:
    """The store that the ranks meet in, and the group.

    Source: `init_custom_process_group` of sglang/srt/utils/common.py: the keys of all ranks must be
    the same.
    """
    timeout = timedelta(seconds=invitation.timeout_s)
    rank, world_size = invitation.rank, invitation.world_size
    root, _, _ = next(_c10d.rendezvous(invitation.url, rank, world_size, timeout=timeout))
    root.set_timeout(timeout)
    store = _c10d.PrefixStore(invitation.name, root)
    group, _ = _c10d._new_process_group_helper(  # noqa: SLF001 - there is no public way
        world_size,
        rank,
        [],
        dist.Backend(invitation.backend),
        store,
        group_name=invitation.name,
        timeout=FOREVER,
    )
    _c10d._world.pg_group_ranks[group] = {each: each for each in range(world_size)}  # noqa: SLF001
    return store, group


def serve(rank: JoinedRank, memories: socket.socket, answers: TextIO) -> None:
    """Carry out orders until stdin ends, or rank 0 has left."""
    decoder = msgspec.json.Decoder(Receive)
    while True:
        if not select.select([sys.stdin], [], [], WATCH_S)[0]:
            rank.require_rank_0()
            continue
        line = sys.stdin.readline()
        if not line:
            return
        _, [memory], *_ = socket.recv_fds(memories, 1, 1)
        try:
            rank.receive(decoder.decode(line), memory)
        finally:
            os.close(memory)
        say(Answer(), answers)


def say(answer: Answer, answers: TextIO) -> None:
    """One line."""
    answers.write(msgspec.json.encode(answer).decode() + "\n")
    answers.flush()


def main() -> None:
    """See the module."""
    die_with_parent(int(os.environ.pop(PARENT_VARIABLE, "0")))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where nccl writes its log
    invitation = msgspec.json.decode(sys.argv[1], type=Invitation)
    if invitation.backend == "nccl" and not torch.cuda.is_available():
        say(Answer(NO_GPU, is_unsupported=True), answers)
        return
    try:
        rank = JoinedRank(invitation)
        say(Answer(), answers)
        with socket.socket(fileno=int(sys.argv[2])) as memories:
            serve(rank, memories, answers)
    except (RuntimeError, ValueError) as error:
        say(Answer(first_line(error)), answers)


if __name__ == "__main__":
    main()
