"""What a step loop drives: the requests of one engine that run together."""

from collections import deque
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from typing import Protocol

from rolloutbus.bus.wire.ids import AttemptKey
from rolloutbus.engine_worker.engine import Step
from rolloutbus.engine_worker.engines.shared.request import EngineRequest


class Stepper(Protocol):
    """Computes steps. Only the loop's thread calls it; other threads may read the gauges."""

    @property
    def n_running(self) -> int:
        """Requests that run; a gauge."""
        ...

    @property
    def n_kv_tokens(self) -> int:
        """Tokens of KV cache that running requests hold; a gauge."""
        ...

    @property
    def version(self) -> int:
        """Of the weights that the next step uses; a gauge."""
        ...

    def start(self) -> None:
        """Set up what belongs to the thread that steps."""
        ...

    def admit(self, waiting: deque[EngineRequest]) -> None:
        """Move from the left of `waiting` what can run now; with none running, at least one."""
        ...

    def compute(self) -> None:
        """Compute one step for all that run, without changing any request. May be slow."""
        ...

    def accept(self, dropped: AbstractSet[AttemptKey]) -> Step:
        """Give the computed tokens to their requests, except to the dropped. Must be quick.

        Requests with a finish no longer run afterwards.
        """
        ...

    def release(self, keys: Collection[AttemptKey]) -> None:
        """Forget those of `keys` that run."""
        ...

    def retract(self, *, without_tokens_only: bool = False) -> list[EngineRequest]:
        """Drop the KV of running requests and hand them back, oldest first, their tokens kept.

        Args:
            without_tokens_only: only those whose KV is still being filled before their first
                token since they were admitted.
        """
        ...
