"""What SGLang may be asked to do in its present state: tables, and nothing that touches SGLang.

Many a call at the wrong time ends SGLang's scheduler by an assertion, and with it every request.
Here it is refused before, with a reason that says what to do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rolloutbus.bus.actor.effects import next_state
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.engine_worker.engine import EngineBusy, InFlight

GateState = Literal["running", "held", "retracted", "settled"]
GateEvent = Literal["hold", "retract", "settle", "go_on"]
Stop = Literal["hold", "retract"]
"""Requests stay in their batch, or go back to the queue."""

GATE_LIFE: Mapping[GateState, Mapping[GateEvent, GateState]] = {
    "running": {"hold": "held", "retract": "retracted", "settle": "settled"},
    "held": {"hold": "held", "retract": "retracted", "go_on": "running"},
    "retracted": {"hold": "retracted", "retract": "retracted", "go_on": "running"},
    "settled": {"hold": "settled", "retract": "settled", "settle": "settled", "go_on": "running"},
}
"""state -> event -> state, of the gate before SGLang's scheduler."""

PAUSED = "paused"
"""A reason to keep the gate shut. Released memory and torn weights are two more."""

WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"
TAGS = (WEIGHTS, CUDA_GRAPH, KV_CACHE)
"""Of memory, in the order in which it is taken back."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What this SGLang, started with these arguments, can do; found by looking."""

    keeps_weights: bool = False
    """Released weights come back with their values: `enable_weights_cpu_backup`."""
    flushes_queued: bool = False
    """Its cache can be flushed while retracted requests wait."""
    has_replicas: bool = False
    """Of the whole model, each with requests of its own: `dp_size` > 1."""
    has_stages: bool = False
    """Split into pipeline stages, each with several batches by turns: `pp_size` > 1."""
    shares_weights: bool = False
    """They belong to a cache of other processes: `weight_cache_mode`."""
    mixes_versions: bool = False
    """What it stores of the prefix cache does not tell the weights: `hicache_storage_backend`."""


@dataclass(slots=True)
class StateGuard:
    """One engine's state; the caller serialises the calls."""

    can: Abilities = Abilities()
    state: GateState = "running"
    reasons: set[str] = field(default_factory=set[str])
    """Why the gate is shut, besides memory and weights."""
    released: set[str] = field(default_factory=set[str])
    """Tags of memory that is given up now."""
    is_torn: bool = False
    """The weights are of no version: they came back as garbage, or an update broke off."""
    is_updating: bool = False
    """A change of weights is under way; what runs meanwhile is its own affair."""
    waits_for_requests: bool = False
    """It waits for the last of what runs: `finish_old`."""

    @property
    def must_stay_shut(self) -> bool:
        """Whether anything speaks against going on."""
        return bool(self.reasons or self.released or self.is_torn)

    def moved(self, event: GateEvent) -> None:
        """SGLang has done it. LocalProtocolError: it was never asked whether it may."""
        self.state = next_state(GATE_LIFE, self.state, event, "SGLang")

    def check_stop(self, how: Stop) -> None:
        """Whether requests can be stopped on their way.

        Raises:
            EngineFailed: not by this engine.
            EngineBusy: not now.
        """
        if how == "hold" and self.can.has_stages:
            message = (
                "pipeline stages (`pp_size` > 1) cannot hold their batches; use `retract`, `abort` "
                "or `drain`"
            )
            raise EngineFailed(Problem("unsupported", message, "not_started", field="mode"))
        if how == "hold" and self.waits_for_requests and self.can.has_replicas:
            # Those without requests have the new weights; the others could never follow.
            raise EngineBusy("an update waits for what runs (`finish_old`); pause after its end")

    def check_flush(self, n_live: int) -> None:
        """Whether the prefix cache can be flushed, with so many requests in the engine.

        Raises:
            EngineBusy: not now.
        """
        self._check_no_update()
        if self.state == "running" and n_live:
            raise EngineBusy(f"{n_live} requests run; pause with `abort` or `drain` first")
        if self.state == "held" and n_live:
            raise EngineBusy(f"{n_live} requests are held in place; send resume, or pause `abort`")
        if self.state == "retracted" and n_live and not self.can.flushes_queued:
            raise EngineBusy(
                f"{n_live} retracted requests wait, and this SGLang flushes no cache beside a "
                "queue; send resume, or pause with `abort`"
            )

    def check_release(self, tags: Sequence[str], n_live: int) -> list[str]:
        """Which of `tags` are to be released: those that are not.

        Raises:
            ValueError: there is no such tag.
            EngineFailed: not by this engine.
            EngineBusy: not now.
        """
        asked = _known(tags)
        if WEIGHTS in asked and self.can.shares_weights:
            message = "the weights belong to a cache of other processes (`weight_cache_mode`)"
            raise EngineFailed(Problem("unsupported", message, "not_started", field="tags"))
        self._check_no_update()
        if n_live and self.state != "settled":
            raise EngineBusy(f"{n_live} requests are in the engine; pause with `abort` first")
        return [tag for tag in asked if tag not in self.released]

    def check_take_back(self, tags: Sequence[str]) -> list[str]:
        """Which of `tags` are to be taken back: those that are released.

        Raises:
            ValueError: there is no such tag.
        """
        return [tag for tag in _known(tags) if tag in self.released]

    def took_back(self, tag: str) -> None:
        """SGLang has its memory again."""
        self.released.remove(tag)
        if tag == WEIGHTS and not self.can.keeps_weights:
            self.is_torn = True

    def check_takes_updates(self) -> None:
        """Whether this engine's weights can be changed at all. EngineFailed: they cannot."""
        if self.can.shares_weights:
            message = "the weights belong to a cache of other processes (`weight_cache_mode`)"
            raise EngineFailed(Problem("unsupported", message, "not_started"))
        if self.can.mixes_versions:
            message = (
                "this SGLang would find stored KV of older weights; start it without "
                "`hicache_storage_backend`"
            )
            raise EngineFailed(Problem("unsupported", message, "not_started"))

    def begin_update(self, in_flight: InFlight, n_live: int) -> None:
        """Weights are about to be changed, with so many requests in the engine.

        Raises:
            EngineFailed: not in this engine.
            EngineBusy: not now.
        """
        self.check_takes_updates()
        self._check_no_update()
        if WEIGHTS in self.released:
            raise EngineBusy("the weights are asleep: wake them up before an update")
        waits = in_flight == "finish_old"
        if waits and n_live and self.state == "held" and self.can.has_replicas:
            # A single scheduler judges for itself; of several, some might do it and others not.
            raise EngineBusy("requests are held in place: finish_old might never end; send resume")
        self.is_updating, self.waits_for_requests = True, waits

    def end_update(self, *, is_torn: bool) -> None:
        """Nothing is changed any more; `is_torn`: what is there now is of no version."""
        self.is_updating = self.waits_for_requests = False
        self.is_torn = is_torn

    def check_whole(self) -> None:
        """Whether there are weights to be read. EngineBusy: not now."""
        if WEIGHTS in self.released:
            raise EngineBusy("the weights are asleep: wake them up first")
        if self.is_torn:
            raise EngineBusy("the weights are of no version: update them first")
        self._check_no_update()

    def _check_no_update(self) -> None:
        if self.is_updating:
            raise EngineBusy("a weight update is under way; wait for its end")


def _known(tags: Sequence[str]) -> list[str]:
    unknown = sorted(set(tags) - set(TAGS))
    if unknown:
        raise ValueError(f"tags: {unknown} are none of {', '.join(TAGS)}")
    return [tag for tag in TAGS if tag in tags]
