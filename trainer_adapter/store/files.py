"""Versions as files below one directory: safetensors, published by a rename, then never changed.

`<policy>/<version>/model-00001.safetensors`, … and, for people, `manifest.json` with the digests.
What begins with a dot is not finished. Files are private to this user.
"""

import errno
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from rolloutbus.bus.paths import FileRules, open_named
from rolloutbus.bus.weights.manifest import Bytes, bytes_of
from rolloutbus.bus.weights.tensor_files import MANIFEST, header_of, read_shards, shard_name, shards
from rolloutbus.bus.wire.messages.weights import Tensor
from rolloutbus.trainer_adapter.store.ledger import sync_directory
from rolloutbus.trainer_adapter.store.versions import VersionKey

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ENCODED = "x-"
"""Begins the directory of a policy whose name is spelled in hexadecimal digits."""
_BLOCK_BYTES = 64 * 1024 * 1024


class WeightFiles:
    """All versions of one store on disk."""

    def __init__(self, root: Path, owner: str) -> None:
        """`owner` keeps what is unfinished apart from other stores' on the same disk."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.root = root
        self._owner = owner
        self._is_closed = False

    def write(self, key: VersionKey, tensors: Sequence[Tensor], content: Bytes) -> str:
        """Write a sealed version; returns its place below the root once it would survive a crash.

        Raises:
            OSError: the disk would not take it, or `close` was called; nothing is left behind.
        """
        at = place_of(key)
        target = self.root / at
        target.parent.mkdir(mode=0o700, exist_ok=True)
        unfinished = self.root / f".{self._owner}-{target.parent.name}-{target.name}"
        try:
            unfinished.mkdir(mode=0o700)
            for number, shard in enumerate(shards(tensors), start=1):
                parts = [header_of(shard), *(bytes_of(content, each).data for each in shard)]
                self._write(unfinished / shard_name(number), parts)
            self._write(unfinished / MANIFEST, [_manifest(key, tensors)])
            sync_directory(unfinished)
            unfinished.rename(target)
            sync_directory(target.parent)
            sync_directory(self.root)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return at

    def read(self, key: VersionKey, tensors: Sequence[Tensor], content: Bytes) -> None:
        """Fill `content` with a version's bytes; its digests are not verified.

        Raises:
            BusError: the files are not there or do not hold these tensors.
            OSError: the disk failed.
        """
        rules = FileRules((self.root,))
        at = place_of(key)
        read_shards(lambda name: open_named(f"{at}/{name}", rules), tensors, content)

    def has(self, key: VersionKey) -> bool:
        """Whether the version was written."""
        return (self.root / place_of(key)).is_dir()

    def remove(self, key: VersionKey) -> None:
        """Delete a version, if it is there; what a reader still holds open may stay for `sweep`.

        Raises:
            OSError: the disk would not let it go.
        """
        target = self.root / place_of(key)
        # Renamed first: a reader that sees the version's directory sees all of it.
        doomed = self.root / f".{self._owner}-gone-{target.parent.name}-{target.name}"
        try:
            target.rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self, owners: Sequence[str]) -> None:
        """Delete what these earlier stores left unfinished."""
        for owner in owners:
            for path in self.root.glob(f".{owner}-*"):
                shutil.rmtree(path, ignore_errors=True)

    def taken(self) -> Iterable[VersionKey]:
        """Yields every version in the files, whichever store wrote it."""
        for path in self.root.glob("[!.]*/*"):
            if path.name.isdecimal():
                yield _policy_of(path.parent.name), int(path.name)

    def close(self) -> None:
        """A write under way fails soon, later ones at once."""
        self._is_closed = True

    def _write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for part in parts:
                written = 0
                while written < len(part):
                    if self._is_closed:
                        raise OSError(errno.ECANCELED, "the store is leaving")
                    written += os.write(fd, part[written : written + _BLOCK_BYTES])
                    # Often, so that neither leaving nor the rest of the machine waits for long.
                    os.fdatasync(fd)
            os.fsync(fd)
        finally:
            os.close(fd)


def _manifest(key: VersionKey, tensors: Sequence[Tensor]) -> bytes:
    digests = {each.name: f"{each.digest:016x}" for each in tensors}
    named = {"policy": key[0], "version": key[1], "xxh3_64": digests}
    return msgspec.json.format(msgspec.json.encode(named))


def _policy_of(directory: str) -> str:
    digits = directory.removeprefix(_ENCODED)
    try:
        return bytes.fromhex(digits).decode() if digits != directory else directory
    except ValueError:
        return directory


def place_of(key: VersionKey) -> str:
    """Directory of a version, relative to the root: a path that `bus.paths` accepts."""
    policy, version = key
    if _PLAIN.fullmatch(policy) is None or policy.startswith(_ENCODED):
        policy = _ENCODED + policy.encode().hex()
    return f"{policy}/{version}"
