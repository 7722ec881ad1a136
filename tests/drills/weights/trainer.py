"""`python -m tests.drills.weights.trainer --settings-file FILE`: publishes what stdin says."""

import asyncio
import sys
from pathlib import Path

import msgspec
import torch

from rolloutbus.bus.actor.loop import BootClock
from rolloutbus.bus.actor.process import ActorExit, announce_ready, run_actor
from rolloutbus.bus.wire.errors import BusError, RequestError
from rolloutbus.trainer_adapter.client.client import connect
from rolloutbus.trainer_adapter.publisher.collective import CollectiveOffering
from rolloutbus.trainer_adapter.publisher.publisher import WeightPublisher
from rolloutbus.trainer_adapter.publisher.transfer import PublishOptions
from tests.drills.chaos.records import HistoryWriter, Offered, PublicationOutcome, Settled
from tests.drills.weights.orders import Forget, Order, Told, TrainerSettings

SHAPES = {"embed.weight": (8, 4), "head.weight": (4,)}
"""Of the fake engine's tensors, float32."""
GROUP_TIMEOUT_S = 5.0
"""So long the others wait for a rank that has died."""


async def serve(settings: TrainerSettings) -> ActorExit:
    """Publish until stdin ends."""
    orders = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    with HistoryWriter(Path(settings.history)) as history:
        async with connect(settings.endpoint, name="trainer") as client:
            publisher = WeightPublisher(client)
            publisher.offer("collective", CollectiveOffering(timeout_s=GROUP_TIMEOUT_S))
            announce_ready()
            while line := await orders.readline():
                order = msgspec.json.decode(line, type=Order | Forget)
                if order == "forget":
                    publisher.forget()
                else:
                    await _publish(publisher, order, settings.deadline_s, history)
    return ActorExit.STOPPED


async def _publish(
    publisher: WeightPublisher, order: Order, deadline_s: float, history: HistoryWriter
) -> None:
    clock = BootClock()
    weights = {name: torch.full(shape, order.value) for name, shape in SHAPES.items()}
    options: PublishOptions = {
        "transport": order.transport,
        "mode": order.mode,
        "in_flight": order.in_flight,
        "require": order.require,
        "deadline_s": deadline_s,
    }
    handle = publisher.start(weights, **options)
    version = 0
    async for now in handle.changes():
        if now.version and not version:
            version = now.version
            history.add(Offered(version, clock.now()))
        _tell(Told(now.phase, now.version, now.n_prepared, now.n_active))
    outcome: PublicationOutcome = "committed"
    by: dict[str, str] = {}
    why = ""
    try:
        by = (await handle).transport
    except BusError as error:
        outcome, why = _outcome_of(error), str(error)
    if version:
        history.add(Settled(version, clock.now(), outcome, why))
    _tell(Told(handle.progress.phase, version, outcome=outcome, by=by, why=why))


def _tell(told: Told) -> None:
    sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
    sys.stdout.flush()


def _outcome_of(error: BusError) -> PublicationOutcome:
    if isinstance(error, RequestError) and error.outcome != "unknown":
        return "refuted"
    return "unknown"


if __name__ == "__main__":
    sys.exit(run_actor("tests.drills.weights.trainer", TrainerSettings, serve))
