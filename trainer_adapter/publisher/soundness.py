"""Whether a version may be published: a diverged trainer's bytes stay where they are."""

from collections.abc import Sequence
from typing import Literal

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import Tensor
from rolloutbus.trainer_adapter.publisher.host_copy import Judgement

WeightCheck = Literal["finite", "off"]


class Soundness:
    """Compares each version of one policy with the one committed before."""

    def __init__(self, check: WeightCheck = "finite") -> None:
        self._check = check
        self._nonzero: set[str] = set()
        """Tensors of the last version that were not all zero; integers are not looked at."""

    def require(
        self,
        layout: Sequence[Tensor],
        judgements: Sequence[Judgement],
        *,
        allow_zeros: bool = False,
    ) -> None:
        """Check what is about to be sealed.

        A tensor of nothing but zeros is an error only if it had other values in the last version:
        fresh adapters and biases are zero, a forgotten gather is, too. `allow_zeros`: it is none.

        Raises:
            Refused: a tensor holds infinity or NaN, or was set to zero; `.field` names it.
        """
        if self._check == "off":
            return
        for tensor, judged in zip(layout, judgements, strict=True):
            if not judged.is_finite:
                raise _unsound(tensor, "it holds infinity or NaN: has the training diverged?")
            if judged.is_zero and tensor.name in self._nonzero and not allow_zeros:
                why = (
                    "it is all zero, and was not in the last version: has a gather been forgotten? "
                    "If it should be, publish it with allow_zeros=True"
                )
                raise _unsound(tensor, why)

    def committed(self, layout: Sequence[Tensor], judgements: Sequence[Judgement]) -> None:
        """This is the last version now."""
        self._nonzero = {
            tensor.name
            for tensor, judged in zip(layout, judgements, strict=True)
            if not judged.is_zero and not tensor.dtype.startswith(("I", "U", "BOOL"))
        }

    def restored(self) -> None:
        """The last version is an older one now, whose values nobody here remembers."""
        self._nonzero = set()


def _unsound(tensor: Tensor, message: str) -> Refused:
    return Refused(Problem("bad_request", message, "not_started", field=f"tensors.{tensor.name}"))
