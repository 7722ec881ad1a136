"""Storage that speaks S3: a checkpoint's files become objects below a prefix.

boto3 reads who may write, and where (`AWS_ENDPOINT_URL` of other storage than Amazon's), from the
worker's environment, as everywhere else. It is an optional dependency, imported when it is needed.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.endings import Problem

SCHEME = "s3://"
PACKAGE = "boto3"
INSTALL = "install boto3 where this worker runs: pip install 'rolloutbus[s3]'"


class ObjectPrefix(NamedTuple):
    """A place in a bucket."""

    bucket: str
    prefix: str
    """Of its objects' keys, without a slash at the end."""

    @classmethod
    def of(cls, address: str) -> Self:
        """The place that `s3://BUCKET/PREFIX` names."""
        bucket, _, prefix = address.removeprefix(SCHEME).partition("/")
        return cls(bucket, prefix.strip("/"))

    def require_empty(self) -> None:
        """Look before anything is written.

        Raises:
            EngineFailed: something is there already, or boto3 is not installed.
            OSError: the storage does not answer, or does not let this worker look.
        """
        found = _asked(
            lambda s3: s3.list_objects_v2(Bucket=self.bucket, Prefix=f"{self.prefix}/", MaxKeys=1)
        )
        if found["KeyCount"]:
            name = self.prefix.rpartition("/")[2]
            message = f"{name!r} is there already; choose another name"
            raise EngineFailed(Problem("bad_request", message, "not_started", field="name"))

    def upload(self, folder: Path, files: list[str], last: str) -> None:
        """Write these files of a folder.

        Args:
            folder: where they are.
            files: their paths in it.
            last: written after all others, so that whoever finds it finds the rest, too.

        Raises:
            OSError: the storage has not taken them all; what it took is deleted again.
        """
        written: list[str] = []
        try:
            for name in sorted(files, key=lambda each: (each == last, each)):
                key = f"{self.prefix}/{name}"
                written.append(key)
                _asked(lambda s3, n=name, k=key: s3.upload_file(str(folder / n), self.bucket, k))
        except OSError:
            for key in written:
                _asked(lambda s3, k=key: s3.delete_object(Bucket=self.bucket, Key=k))
            raise


def _asked(call: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - boto3 is untyped
    """What a call of an S3 client returns; its errors as OSError."""
    try:
        boto3: Any = importlib.import_module(PACKAGE)
    except ImportError as error:
        problem = Problem("unsupported", f"To write there, {INSTALL}.", "not_started")
        raise EngineFailed(problem) from error
    botocore: Any = importlib.import_module("botocore.exceptions")
    failures = (boto3.exceptions.Boto3Error, botocore.BotoCoreError, botocore.ClientError)
    try:
        return call(boto3.client("s3"))
    except failures as error:
        raise OSError(f"the storage says: {error}") from error
