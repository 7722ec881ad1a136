"""Checkpoints in safetensors files, read one tensor at a time: what a publisher copies from."""

import os
from collections.abc import Callable, Generator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import torch

from rolloutbus.bus.paths import FileRules, named_directory, open_named
from rolloutbus.bus.weights.manifest import DTYPES, Bytes
from rolloutbus.bus.weights.tensor_files import (
    LENGTH_BYTES,
    FileRange,
    header_bytes,
    parse_header,
)
from rolloutbus.bus.wire.errors import Refused, RemoteProtocolError
from rolloutbus.bus.wire.messages.endings import bad_request
from rolloutbus.trainer_adapter.publisher.tensor_source import TORCH_DTYPES, Layout

INDEX = "model.safetensors.index.json"
"""Of a checkpoint in several files: which tensor lies in which."""
MAX_INDEX_BYTES = 100_000_000


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Place(NamedTuple):
    name: str
    fd: int
    where: FileRange


class Checkpoint:
    """The tensors of open safetensors files. Owns their descriptors: close it, or use `with`."""

    def __init__(self, fds: Sequence[int], *, field: str) -> None:
        """Reads the headers only; closes the files if it raises.

        Args:
            fds: of the files, readable at any place.
            field: what a caller called them, for errors.

        Raises:
            Refused: a file is none of the format, holds what cannot be published, or two files
                hold tensors of the same name.
        """
        self._fds = list(fds)
        self._places: list[_Place] = []
        try:
            for fd in fds:
                self._places += [_Place(name, fd, where) for name, where in _header(fd).items()]
            self._check()
        except (RemoteProtocolError, ValueError) as error:
            self.close()
            raise Refused(bad_request(field, str(error))) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    @property
    def layout(self) -> Layout:
        """What `tensors` will give."""
        return [(name, TORCH_DTYPES[where.dtype], where.shape) for name, _, where in self._places]

    @property
    def names(self) -> set[str]:
        """Of all its tensors."""
        return {place.name for place in self._places}

    def tensors(self) -> Generator[tuple[str, torch.Tensor]]:
        """Each tensor, in the order of `layout`; one is in memory at a time.

        Raises:
            Refused: a file became shorter meanwhile.
        """
        for name, fd, where in self._places:
            content = torch.empty(where.size_bytes, dtype=torch.uint8)
            place: Bytes = content.numpy()
            _read(fd, where, place.data, name)
            yield name, content.view(TORCH_DTYPES[where.dtype]).reshape(where.shape)
            del content

    def _check(self) -> None:
        if not self._places:
            raise ValueError("there is no tensor in it")
        if len(self.names) < len(self._places):
            raise ValueError("two files of it hold a tensor of the same name")
        for name, _, where in self._places:
            if where.dtype not in TORCH_DTYPES:
                raise ValueError(f"tensor {name!r}: {where.dtype} cannot be published")
            if prod(where.shape) * DTYPES[where.dtype].size_bytes != where.size_bytes:
                raise ValueError(f"tensor {name!r} has another size than its shape")


def checkpoint_in(directory: str | os.PathLike[str], *, field: str = "tensors") -> Checkpoint:
    """The checkpoint in a directory; links are followed, as those of a hub cache's snapshot.

    With an index it is the files and the tensors that this one names; else all `*.safetensors`.

    Raises:
        Refused: there is none, or it does not hold what its index says; `.field` is `field`.
    """
    path = Path(directory)

    def opened(name: str) -> int:
        return os.open(path / name, os.O_RDONLY | os.O_CLOEXEC)

    try:
        return _checkpoint(os.listdir(path), opened, str(path), field)  # noqa: PTH208 - names
    except OSError as error:
        message = f"{error.filename or path} cannot be read: {error.strerror}"
        raise Refused(bad_request(field, message)) from error


def checkpoint_below(root: Path, name: str, *, field: str = "path") -> Checkpoint:
    """The checkpoint in the directory `name` below `root`, where no link is followed.

    Raises:
        Refused: as of `checkpoint_in`.
    """
    directory = named_directory(name, root, (), field=field)
    index_rules = FileRules((root,), frozenset({".json"}), MAX_INDEX_BYTES)

    def opened(file: str) -> int:
        rules = index_rules if file == INDEX else FileRules((root,))
        return open_named(f"{name}/{file}", rules, field=field)

    try:
        found = os.listdir(directory)  # noqa: PTH208 - names
    except OSError as error:
        message = f"there is no directory {name[:80]!r} below the weights root: {error.strerror}"
        raise Refused(bad_request(field, message)) from error
    return _checkpoint(found, opened, repr(name[:80]), field)


def _checkpoint(
    found: Sequence[str], opened: Callable[[str], int], shown: str, field: str
) -> Checkpoint:
    """The files of a directory that belong to its checkpoint; `opened` opens one by its name."""
    index = _index(opened(INDEX), field) if INDEX in found else None
    if index is None:
        files = sorted(each for each in found if each.endswith(".safetensors"))
    else:
        files = sorted(set(index.weight_map.values()))
    if not files:
        raise Refused(bad_request(field, f"{shown} holds no .safetensors file"))
    if wrong := [each for each in files if each != Path(each).name]:
        raise Refused(bad_request(field, f"{INDEX}: {wrong[0][:80]!r} is no file's name"))
    fds: list[int] = []
    try:
        for each in files:
            fds.append(opened(each))  # noqa: PERF401 - those that were opened are closed below
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    checkpoint = Checkpoint(fds, field=field)
    if index is not None and checkpoint.names != index.weight_map.keys():
        checkpoint.close()
        other = min(checkpoint.names ^ index.weight_map.keys())
        message = f"tensor {other[:80]!r} is in {INDEX} or in a file, not in both"
        raise Refused(bad_request(field, message))
    return checkpoint


def _index(fd: int, field: str) -> _Index:
    with os.fdopen(fd, "rb") as file:
        try:
            return msgspec.json.decode(file.read(), type=_Index)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(bad_request(field, f"{INDEX} is no index: {error}")) from error


def _header(fd: int) -> dict[str, FileRange]:
    length = header_bytes(os.pread(fd, LENGTH_BYTES, 0))
    return dict(parse_header(os.pread(fd, length, LENGTH_BYTES), os.fstat(fd).st_size))


def _read(fd: int, where: FileRange, place: memoryview, name: str) -> None:
    n_read = 0
    while n_read < len(place):
        n_new = os.preadv(fd, [place[n_read:]], where.start + n_read)
        if not n_new:
            message = f"the file of tensor {name!r} became shorter while it was read"
            raise Refused(bad_request(f"tensors.{name}", message))
        n_read += n_new
