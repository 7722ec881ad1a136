"""The store's answers when it cannot do what it is asked."""

from collections.abc import Sequence

from rolloutbus.bus.wire.limits import CHUNK_BYTES
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.versions import MAX_VERSION

MAX_POLICY_BYTES = 64
MAX_NAMED = 32
"""Versions in one sentence."""


def bad_policy(policy: str) -> Problem | None:
    """Returns why a text cannot be a policy's name; None if it can."""
    if 0 < len(policy.encode()) <= MAX_POLICY_BYTES and policy.isprintable():
        return None
    return bad_request("policy", f"a policy's name has 1 to {MAX_POLICY_BYTES} printable bytes")


def unavailable(policy: str, version: int) -> Problem:
    """There is no such version, or it is in no state for this."""
    name = policy[:MAX_POLICY_BYTES]
    message = f"the store has no version {version} of policy {name!r} that this can be done with"
    return Problem("version_unavailable", message, "not_started", field="version")


def not_kept(policy: str, version: int, kept: Sequence[int]) -> Problem:
    """There is no such version to go back to; names the latest ones that there are."""
    of = f"version {version} of policy {policy[:MAX_POLICY_BYTES]!r} is not kept"
    numbers = ", ".join(map(str, kept[-MAX_NAMED:]))
    there = f"kept are {numbers}" if kept else "none of this policy is"
    return Problem("version_unavailable", f"{of}; {there}", "not_started", field="version")


def store_full(reason: str, reserved_bytes: int) -> Problem:
    """No room for another version."""
    message = f"{reason}; give /dev/shm more memory, or keep fewer versions"
    if reserved_bytes:
        message += f"; {reserved_bytes} bytes belong to versions that are being written now"
    return Problem("store_full", message, "not_started")


def unwritable(reason: str) -> Problem:
    """A full disk: what cannot be written down is not decided."""
    message = f"the store cannot write versions down: {reason}; make room on that disk"
    return Problem("store_full", message, "not_started")


def wrong_bytes(tensor: str) -> Problem:
    """A tensor's bytes are not those that its digest was made of."""
    message = f"tensor {tensor!r} does not have the bytes that its digest was made of"
    return Problem("digest_mismatch", message, "failed", field=f"tensors.{tensor}")


def older(policy: str, version: int, last: int) -> Problem:
    """Returns the refusal of a commit that is older than the committed version."""
    message = f"version {last} of policy {policy!r} is committed already; {version} is older"
    return Problem("stale_version", message, "not_started", field="version")


def number_taken(policy: str, version: int, last: int) -> Problem:
    """Returns the refusal of a number that was given before, or passed over."""
    message = f"version {last} of policy {policy!r} was begun already, and numbers only grow"
    return Problem("stale_version", f"{message}: {version} is not above", "not_started", "version")


def no_number_after(policy: str, last: int) -> Problem | None:
    """Returns the refusal of a version after the largest number; None: there are others."""
    if last < MAX_VERSION:
        return None
    message = f"version {last} of policy {policy!r} has the largest number: none follows"
    return Problem("bad_request", message, "not_started", "version")


def no_delta(version: int, base: int) -> Problem:
    """Returns the refusal of a delta that would be no smaller than the version."""
    message = f"version {version} is no longer than what changed since {base}, or has other tensors"
    return Problem("no_delta", message, "not_started", field="base")


def bad_range(whole_bytes: int, offset: int, size_bytes: int) -> Problem | None:
    """Why these bytes of `whole_bytes` may not be read or written; None if they may."""
    if not 0 < size_bytes <= CHUNK_BYTES:
        return bad_request("size_bytes", f"a chunk has 1 to {CHUNK_BYTES} bytes, not {size_bytes}")
    if offset < 0 or offset + size_bytes > whole_bytes:
        return bad_request("offset", f"{offset}+{size_bytes} is outside of {whole_bytes} bytes")
    return None
