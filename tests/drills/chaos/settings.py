"""What a chaos run is told: how much, how long, from which seed."""

from typing import Annotated, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0.0)]


class ChaosSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run."""

    seed: int
    faults: Positive = 200
    clients: Positive = 50
    open_requests: Positive = 500
    """Kept open by all clients together."""
    workers: Positive = 8
    minutes: Seconds = 5.0
    """The whole run, start and drain included."""
    engine: Literal["fake", "transformers"] = "fake"
    model: str = ""
    """Directory of the transformers engine's model."""
    client_processes: Positive = 2
    """That nobody kills; one more is there to be killed, with a tenth of the clients."""
    has_detached: bool = True
    """Half the requests of the clients that may be killed are collected by who comes after them."""
    update_every_s: Seconds = 5.0
    """About; the fake engine only, and only where the publisher can be imported."""
    deadline_s: Seconds = 90.0
    """Of each request; one that needs longer counts as lost."""

    directory: str = ""
    """Gets histories and logs, and keeps them; empty: they are thrown away."""

    @property
    def step_s(self) -> float:
        """What a step of the fake engine costs."""
        return max(FAKE_STEP_S, self.open_requests / FAKE_TOKENS_PER_S)

    @property
    def max_tokens(self) -> int:
        """Of a request; a quarter of it at least is asked for."""
        return round(FAKE_LONGEST_S / self.step_s) if self.engine == "fake" else MODEL_MAX_TOKENS

    @property
    def faults_for_s(self) -> float:
        """Seconds from the first fault to the last."""
        seconds = self.minutes * 60.0
        return max(5.0, min(seconds - SURROUNDINGS_S, FAULTS_SHARE * seconds))


FAKE_STEP_S = 0.05
FAKE_TOKENS_PER_S = 10_000
"""Of all workers together, at most: what two cores can carry and write down."""
FAKE_LONGEST_S = 4.0
"""No request runs longer: one that starts again after each loss has to fit between two of them."""
MODEL_MAX_TOKENS = 32
FAULTS_SHARE = 0.8
"""Of a long run, at most: after more faults it takes longer to end what they have moved."""
SURROUNDINGS_S = 50.0
"""Of a run: start, warm-up, waits for the router, the last faults' healing, drain and check."""


class LoadSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one client process is told."""

    seed: int
    life: int = 0
    """How often a process of this name was killed before: each asks for other things."""
    endpoints: dict[str, str]
    """Client name -> where it connects."""
    lanes: dict[str, int]
    """Client name -> requests it keeps open."""
    history: str
    """The file that gets the records."""
    deadline_s: float
    max_tokens: int
    """Of a request; each asks for a quarter of it at least."""
    detached_share: float = 0.0
    """Of requests: they go on when this process is killed, and its next life collects them."""
    prompts: list[list[int]] = []
    """Greedy prompts to draw from; empty: any prompt and any seed."""
    exit_with_parent: bool = True


class TrainerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the process is told that publishes weights."""

    seed: int
    life: int
    """As of clients."""
    endpoint: str
    history: str
    every_s: float
    """From one publication to the next, about."""
    deadline_s: float
    """Of each publication."""
    exit_with_parent: bool = True
