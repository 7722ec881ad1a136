"""The tensors of a checkpoint, from the headers of its files."""

from collections.abc import Sequence
from pathlib import Path

from rolloutbus.bus.weights.tensor_files import LENGTH_BYTES, header_bytes, parse_header
from rolloutbus.bus.wire.errors import RemoteProtocolError
from rolloutbus.engine_worker.engines.sglang.schedulers.orders import CheckpointTensor


def tensors_of(model: Path) -> Sequence[CheckpointTensor]:
    """All of them by name, in the order of the files.

    Raises:
        ValueError: a file is none of the safetensors format; names it.
    """
    found: dict[str, CheckpointTensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            try:
                text = file.read(header_bytes(file.read(LENGTH_BYTES)))
                ranges = parse_header(text, path.stat().st_size)
            except RemoteProtocolError as error:
                raise ValueError(f"model: {path}: {error}") from error
        in_order = sorted(ranges.items(), key=lambda item: item[1].start)
        for name, place in in_order:
            found.setdefault(name, CheckpointTensor(name, place.dtype, place.shape))
    return [*found.values()]
