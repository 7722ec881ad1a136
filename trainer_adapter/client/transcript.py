"""The tokens of a trajectory, turn by turn: which were sampled, how likely, by which weights.

They are the truth; what engines keep in their caches only saves time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.codec import AnyArray
from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.near_names import no_attribute
from rolloutbus.trainer_adapter.client.asks import Prompt, tokens_of
from rolloutbus.trainer_adapter.client.core.results import Float32s, Int32s, Int64s, Rollout

NO_VERSION = -1
"""In place of the version of a token that no weights sampled."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Tokens that came together."""

    tokens: Int32s
    """int32 [k]."""
    rollout: Rollout | None = None
    """How they were sampled; None: they were appended, as prompts and observations are."""

    @property
    def is_sampled(self) -> bool:
        """Whether a model chose them, so that a loss may be reckoned of them."""
        return self.rollout is not None


@strict()
class Transcript:
    """The turns of one trajectory. Its arrays have an item for each token, in order."""

    def __init__(self, turns: Sequence[Turn] = ()) -> None:
        self._turns = list(turns)

    def __len__(self) -> int:
        return sum(len(turn.tokens) for turn in self._turns)

    @property
    def turns(self) -> Sequence[Turn]:
        """From the first to the last."""
        return tuple(self._turns)

    @property
    def tokens(self) -> Int32s:
        """int32 [n]: what the next turn is sampled after."""
        return _joined((turn.tokens for turn in self._turns), np.int32)

    @property
    def loss_mask(self) -> Int32s:
        """int32 [n]: 1 where a token was sampled, 0 where it was appended."""
        return _joined((_filled(turn, int(turn.is_sampled)) for turn in self._turns), np.int32)

    @property
    def logprobs(self) -> Float32s:
        """float32 [n]: as of `Rollout`; 0 where a token was appended."""
        return self._column(lambda rollout: rollout.logprobs, 0, np.float32)

    @property
    def behaviour_logprobs(self) -> Float32s:
        """float32 [n]: as of `Rollout`; 0 where a token was appended."""
        return self._column(lambda rollout: rollout.behaviour_logprobs, 0, np.float32)

    @property
    def token_versions(self) -> Int64s:
        """int64 [n]: the weights that sampled each token; -1 where it was appended."""
        return self._column(lambda rollout: rollout.token_versions, NO_VERSION, np.int64)

    if not TYPE_CHECKING:  # a type checker knows without it that there is none

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute(self, name, {"versions": "token_versions"})

    def append(self, tokens: Prompt) -> int:
        """Add what no model chose: a prompt, an observation, an end of sequence added by hand.

        Returns its index in `turns`.

        Raises:
            Refused: not token ids, at least one.
        """
        self._turns.append(Turn(tokens_of(tokens)))
        return len(self._turns) - 1

    def add(self, rollout: Rollout) -> int:
        """Add what was sampled after `tokens`; returns its index in `turns`."""
        self._turns.append(Turn(rollout.tokens, rollout))
        return len(self._turns) - 1

    def rewind(self, turn: int) -> None:
        """Forget this turn and all after it.

        Args:
            turn: index in `turns`; negative ones count from the end; its length: nothing happens.

        Raises:
            Refused: there is no such turn.
        """
        self._turns = list(self.before(turn).turns)

    def before(self, turn: int) -> "Transcript":
        """A copy that ends before this turn; arguments and errors as of `rewind`."""
        n = len(self._turns)
        if not -n <= turn <= n:
            message = f"there is no turn {turn} among {n}"
            raise Refused(Problem("bad_request", message, "not_started", field="turn"))
        return Transcript(self._turns[: turn + n if turn < 0 else turn])

    def _column(
        self, of: Callable[[Rollout], AnyArray], filler: int, dtype: type[np.generic]
    ) -> Any:  # noqa: ANN401 - of the type that was asked for
        parts = (
            _filled(turn, filler) if turn.rollout is None else of(turn.rollout)
            for turn in self._turns
        )
        return _joined(parts, dtype)


def _filled(turn: Turn, filler: int) -> AnyArray:
    return np.full(len(turn.tokens), filler)


def _joined(parts: Iterable[AnyArray], dtype: type[np.generic]) -> Any:  # noqa: ANN401 - as above
    return np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype)
