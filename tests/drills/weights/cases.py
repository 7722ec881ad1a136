"""Which party dies in which phase of which kind of update: drawn from the seed beforehand."""

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Literal, get_args

import msgspec

from rolloutbus.bus.wire.messages.weights import InFlight, Transport, UpdateMode

Victim = Literal["trainer", "store", "worker", "host", "router"]
Phase = Literal["preparing", "staged", "recording", "committing", "active"]
"""`preparing`: workers are told, or transfer; `staged`: all but one have said that they have it;
`recording`: the store does not know yet; `committing`: one worker has swapped, the others have not;
`active`: the trainer was told a moment ago."""
Way = tuple[Transport, UpdateMode]

WAYS: Sequence[Way] = (
    ("shm", "staged"),
    ("tcp", "staged"),
    ("delta", "staged"),
    ("disk", "staged"),
    ("collective", "staged"),
    ("shm", "overwrite"),
    ("tcp", "overwrite"),
)
"""Those that need no GPU."""
PAIRS: Sequence[tuple[Victim, Phase]] = tuple(product(get_args(Victim), get_args(Phase)))
N_CELLS = len(PAIRS) * len(WAYS)
IN_FLIGHT: Sequence[InFlight] = ("keep", "retract", "abort")
"""All but `finish_old`, which by its nature lets new requests wait for old ones."""

RULES = ("any", "all")


class Case(msgspec.Struct, frozen=True):
    """One update, and who dies in it."""

    victim: Victim
    phase: Phase
    transport: Transport
    mode: UpdateMode
    in_flight: InFlight
    require: str
    """Success rule: with `all`, who dies before the decision ends the update for everybody."""
    target: int
    """Number of the worker that is hit, or that is ahead of or behind the others."""
    is_store_slow: bool
    """`preparing`: the workers wait for the store, instead of not having begun."""

    @property
    def name(self) -> str:
        """Its cell of the matrix."""
        return f"{self.victim}/{self.phase}/{self.transport}/{self.mode}"


def draw_cases(seed: int, n_cases: int, n_workers: int) -> list[Case]:
    """The first `n_cases` cells of the matrix: every victim in every phase, then by other ways.

    After `N_CELLS` all of them have come.
    """
    rng = Random(seed)
    pairs = list(PAIRS)
    rng.shuffle(pairs)
    first_way = rng.randrange(len(WAYS))
    cases: list[Case] = []
    for number in range(n_cases):
        turn, place = divmod(number, len(pairs))
        victim, phase = pairs[place]
        transport, mode = WAYS[(first_way + place + turn) % len(WAYS)]
        case = Case(
            victim,
            phase,
            transport,
            mode,
            rng.choice(IN_FLIGHT),
            rng.choice(RULES),
            rng.randrange(n_workers),
            rng.random() < 0.5,
        )
        cases.append(case)
    return cases
