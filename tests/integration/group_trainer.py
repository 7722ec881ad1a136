"""Rank 0 of a group that a trainer made itself, in a process of its own: a line of JSON per order.

    python group_trainer.py SOCKET WORLD GROUP BACKEND

SOCKET is the descriptor of one that listens: a port that was only found free may be another's by
now.

It says `{"joined": true}` when all ranks are there. `{"file": F, "names": […], "packed": bool}` has
it broadcast tensors of a safetensors file, as SGLang's trainers do. `"then": "die"`: it is killed
half way through; `"then": "stall"`: it sends half and no more. It tells how each order ended.
"""

# pyright: reportUnknownVariableType=false
# The stubs of safetensors leave parameters untyped.

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

from rolloutbus.bus.actor.process import die_with_parent

_c10d: Any = distributed_c10d
TIMEOUT = timedelta(seconds=180)
"""For the other ranks to come: processes that begin with imports."""


Order = dict[str, Any]


def group_of(listening: int, world: int, name: str, backend: str) -> dist.ProcessGroup:
    """As trainers make it beside their own groups: see `init_custom_process_group` of SGLang."""
    with socket.socket(fileno=os.dup(listening)) as bound:
        host, port = bound.getsockname()
    root = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        *(host, port, world),
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening,
    )
    group, _ = _c10d._new_process_group_helper(
        world,
        0,
        [],
        dist.Backend(backend),
        _c10d.PrefixStore(name, root),
        group_name=name,
        timeout=TIMEOUT,
    )
    _c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group


def broadcasts(order: Order) -> Iterator[torch.Tensor]:
    held = load_file(order["file"], device=order["device"])
    tensors = [held[name] for name in order["names"]]
    if order.get("packed"):
        yield torch.cat([each.flatten().view(torch.uint8) for each in tensors])
    else:
        yield from tensors


def send(order: Order, group: dist.ProcessGroup) -> None:
    pieces = [*broadcasts(order)]
    then = order.get("then", "")
    for n, piece in enumerate(pieces):
        if then and n >= len(pieces) / 2:
            break
        dist.broadcast(piece, src=0, group=group)
    if then == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if then == "stall":
        print(json.dumps({"stalled": True}), flush=True)
        threading.Event().wait()


def main() -> None:
    die_with_parent()
    listening, world, name, backend = sys.argv[1:]
    group = group_of(int(listening), int(world), name, backend)
    device = "cuda" if backend == "nccl" else "cpu"
    print(json.dumps({"joined": True}), flush=True)
    for line in sys.stdin:
        try:
            send({"device": device, **json.loads(line)}, group)
            told = {"problem": ""}
        except RuntimeError as error:
            told = {"problem": str(error)}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
