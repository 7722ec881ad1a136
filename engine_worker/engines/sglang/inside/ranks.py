"""The scheduler processes that hold one copy of the model between them."""

from typing import Any, TypeVar, cast

import torch.distributed

T = TypeVar("T")


class Ranks:
    """As one of them sees it."""

    def __init__(self, group: Any) -> None:  # noqa: ANN401 - torch has no type for it
        """`group`: of PyTorch, for objects of the host."""
        self._group = group
        self.mine: int = torch.distributed.get_rank(group)
        """This process's number."""
        self.n: int = torch.distributed.get_world_size(group)

    def gathered(self, mine: T) -> list[T]:
        """What each rank has here, in their order; returns once all have come."""
        if self.n == 1:
            return [mine]
        of_all: list[Any] = [None] * self.n
        cast("Any", torch.distributed).all_gather_object(of_all, mine, group=self._group)  # untyped
        return of_all
