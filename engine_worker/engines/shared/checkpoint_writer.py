"""A checkpoint of an engine's active weights, as Hugging Face reads it."""

import json
import shutil
from pathlib import Path

from rolloutbus.bus.weights.manifest import lay_out
from rolloutbus.bus.weights.tensor_files import header_of, shard_name, shards
from rolloutbus.bus.wire.messages.control import SaveKind
from rolloutbus.engine_worker.engine import EngineBusy, WeightSink
from rolloutbus.engine_worker.weights.active import pieces

INDEX = "model.safetensors.index.json"
PIECE_BYTES = 64 * 1024 * 1024
"""Read at a time; the engine makes no steps meanwhile."""
BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.txt", "*.model")
"""Files of a model's directory that say what it is and how its text is cut into tokens."""


class CheckpointWriter:
    """Implements `Checkpointer` for a model whose weights are all in this process."""

    def __init__(self, weights: WeightSink, model: Path) -> None:
        """`model`: the directory that the weights were loaded from."""
        self._weights = weights
        self._model = model

    def save(self, destination: str, kind: SaveKind) -> None:
        """See `Checkpointer`."""
        if kind != "safetensors":
            raise ValueError(f"kind: this engine writes `safetensors`, not {kind!r}")
        write_checkpoint(self._weights, self._model, Path(destination))


def write_checkpoint(weights: WeightSink, model: Path, folder: Path) -> None:
    """Write all weights, of one version, and the description of `model` into an empty folder.

    The engine may go on generating. EngineBusy: the version changed on the way, or the weights
    are torn; the folder then holds a part of the checkpoint.
    """
    tensors = lay_out((each.name, each.dtype, each.shape) for each in weights.specs())
    files: dict[str, str] = {}
    versions: set[int] = set()
    for number, shard in enumerate(shards(tensors), start=1):
        name = shard_name(number)
        with (folder / name).open("wb") as file:
            file.write(header_of(shard))
            for piece in pieces(shard, PIECE_BYTES):
                version, found = weights.read_ranges([piece])
                versions.add(version)
                if len(versions) > 1:
                    raise EngineBusy("the weights have changed on the way; save them again")
                file.write(found[0].data)
        files |= dict.fromkeys((each.name for each in shard), name)
    size_bytes = sum(each.size_bytes for each in tensors)
    index = {"metadata": {"total_size": size_bytes}, "weight_map": files}
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    copy_description(model, folder)


def copy_description(model: Path, folder: Path) -> None:
    """Copy what makes weights in `folder` a model: the configuration and the tokenizer."""
    for pattern in BESIDE_WEIGHTS:
        for path in model.glob(pattern):
            if path.is_file() and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
