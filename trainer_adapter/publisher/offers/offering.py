"""What a publisher needs of whoever offers a version by another way than the store.

    offers = await offering.prepare(layout, tensors)  # before the version is sealed
    ... seal_version with the offers, publish_version with them but without their buckets
    await offering.serve()  # a task beside that command; cancel it when the command has ended
    await offering.close()  # in any case, also after a failure

The store gets the bytes too: an offer that fails costs time, never the update.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from rolloutbus.bus.wire.messages.weights import Offer, Tensor


class Offering(Protocol):
    """One way; used for version after version, one at a time."""

    async def prepare(
        self, layout: Sequence[Tensor], tensors: Sequence[torch.Tensor]
    ) -> list[Offer]:
        """Take a copy of `tensors`, cast and laid out as `layout` says, and offer it.

        Returns after the copy: the tensors may change then. An empty list: this way is not open
        to these tensors (they are on a CPU, there is no room, …); nothing is held then.
        """
        ...

    async def serve(self) -> None:
        """Do the owner's part until all who take it this way have it; safe to cancel.

        Does not raise when it fails: those who wanted it this way take another one.
        """
        ...

    def call_off(self) -> None:
        """The workers are being told anew, and not to take it this way: begin no more. Idempotent.

        What has begun goes on: whoever has the bytes need not take them again.
        """
        ...

    async def close(self) -> None:
        """The publication has ended, well or not. Memory is kept for the next one. Idempotent."""
        ...

    def forget(self) -> None:
        """No version follows: give all memory back that nobody reads any more. Idempotent."""
        ...
