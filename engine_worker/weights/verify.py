"""Every byte of a version is checked against its manifest before it counts as staged."""

import asyncio
from collections.abc import Sequence

from rolloutbus.bus.weights.manifest import Bytes, first_mismatch
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import Tensor


async def verify(content: Bytes, tensors: Sequence[Tensor]) -> None:
    """Compare digests in a thread.

    Raises:
        EngineFailed: `digest_mismatch`; `.field` names the first wrong tensor.
    """
    wrong = await asyncio.to_thread(first_mismatch, content, tensors)
    if wrong is not None:
        raise wrong_bytes(wrong.name)


def wrong_bytes(tensor: str) -> EngineFailed:
    """The error for a tensor whose bytes are not those that were published."""
    message = f"tensor {tensor!r} did not arrive as it was published"
    problem = Problem("digest_mismatch", message, "failed", field=f"tensors.{tensor}")
    return EngineFailed(problem)
