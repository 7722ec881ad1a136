"""How large a model's weights are, and whether a machine can hold them, before they are read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from rolloutbus.bus.weights.tensor_files import LENGTH_BYTES, header_bytes, parse_header
from rolloutbus.bus.wire.errors import RemoteProtocolError

GIB = 1 << 30
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes that an engine turns into its own; others, as of quantised weights, stay."""
_MEMORY = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def require_room(model: Path, item_bytes: int, gpus: Sequence[torch.device]) -> None:
    """Refuse a model whose weights alone are larger than all of the memory that they go to.

    Says nothing of files that cannot be read: who loads them says what is wrong.

    Args:
        model: directory with safetensors files; without any, nothing is refused.
        item_bytes: of a floating-point number in the engine.
        gpus: those that share the weights; none: they go to this machine's memory.

    Raises:
        ValueError: it cannot fit; says how much it takes and what there is.
    """
    needed = weights_bytes(model, item_bytes)
    cuda = cast("Any", torch.cuda)  # untyped
    there = sum(int(cuda.get_device_properties(each).total_memory) for each in gpus)
    there = there or host_bytes()
    if needed <= there:
        return
    where = f"{len(gpus)} GPUs" if gpus else "this machine"
    raise ValueError(
        f"model: out of memory before it is loaded: its weights take {needed / GIB:,.1f} GiB, of "
        f"{there / GIB:,.1f} GiB that {where} can hold; take a smaller `dtype`, or more GPUs"
    )


def weights_bytes(model: Path, item_bytes: int) -> int:
    """Bytes that a model's tensors take in memory, by the headers of its files."""
    size_bytes = 0
    for path in model.glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                length = file.read(LENGTH_BYTES)
                tensors = parse_header(file.read(header_bytes(length)), path.stat().st_size)
        except (OSError, RemoteProtocolError):
            continue
        for each in tensors.values():
            n_items = 1
            for extent in each.shape:
                n_items *= extent
            size_bytes += n_items * item_bytes if each.dtype in FLOATS else each.size_bytes
    return size_bytes


def host_bytes() -> int:
    """Memory of this machine, or of the container that this process is in."""
    lines = dict(line.split(":", 1) for line in _MEMORY.read_text(encoding="utf-8").splitlines())
    total = int(lines["MemTotal"].split()[0]) * 1024
    limit = _CGROUP_LIMIT.read_text(encoding="utf-8") if _CGROUP_LIMIT.exists() else ""
    return min(total, int(limit)) if limit.strip().isdigit() else total
