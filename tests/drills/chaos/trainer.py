"""`python -m tests.drills.chaos.trainer --settings-file FILE`: new weights, again and again.

SIGTERM ends it after the publication under way and a last one.
"""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

from rolloutbus.bus.actor.loop import BootClock, Clock
from rolloutbus.bus.actor.process import ActorExit, announce_ready, on_stop_signal, run_actor
from rolloutbus.bus.wire.errors import BusError, RequestError
from rolloutbus.bus.wire.messages.weights import InFlight
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from rolloutbus.trainer_adapter.publisher.publisher import WeightPublisher
from tests.drills.chaos.records import HistoryWriter, Offered, PublicationOutcome, Settled
from tests.drills.chaos.settings import TrainerSettings

IN_FLIGHT: Sequence[InFlight] = ("keep", "retract", "abort")
"""All but `finish_old`, which by its nature lets new requests wait for old ones."""
SHAPES = {"embed.weight": (8, 4), "head.weight": (4,)}
"""Of the fake engine's tensors, float32."""
UPDATE_FAILED = "update_failed"
CONNECT_S = 120.0
"""The router may be away just now, for as long as its start takes."""


async def serve(settings: TrainerSettings) -> ActorExit:
    """Publish every so often until a stop signal."""
    stop = asyncio.Event()
    on_stop_signal(stop.set)
    rng = Random(f"{settings.seed}/{settings.life}")
    with HistoryWriter(Path(settings.history)) as history:
        chosen = ClientSettings("trainer", settings.endpoint, connect_timeout_s=CONNECT_S)
        async with RolloutClient(chosen) as client:
            publisher = WeightPublisher(client)
            announce_ready()
            while not await _is_set_within(stop, rng.uniform(0.5, 1.5) * settings.every_s):
                await _publish(publisher, rng, settings, history)
            # Nothing is broken any more: this one must get through.
            await _publish(publisher, rng, settings, history)
    return ActorExit.STOPPED


async def _publish(
    publisher: WeightPublisher, rng: Random, settings: TrainerSettings, history: HistoryWriter
) -> None:
    clock: Clock = BootClock()
    weights = {name: torch.full(shape, rng.random()) for name, shape in SHAPES.items()}
    in_flight = rng.choice(IN_FLIGHT)
    version, outcome, why = 0, "committed", ""
    try:
        async with publisher.begin(in_flight=in_flight, deadline_s=settings.deadline_s) as update:
            version = await update.put_all(weights)
            history.add(Offered(version, clock.now()))
    except BusError as error:
        outcome, why = _outcome_of(error), str(error)
    if version:
        history.add(Settled(version, clock.now(), outcome, why))


def _outcome_of(error: BusError) -> PublicationOutcome:
    if isinstance(error, RequestError) and error.code == UPDATE_FAILED:
        return "refuted"
    return "unknown"


async def _is_set_within(stop: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
    return stop.is_set()


if __name__ == "__main__":
    sys.exit(run_actor("tests.drills.chaos.trainer", TrainerSettings, serve))
