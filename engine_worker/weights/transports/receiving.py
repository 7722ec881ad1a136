"""One worker's part in a broadcast, from the first word to the last.

Spec: docs/protocol.md, "Collective".
"""

from collections.abc import Callable

from rolloutbus.bus.weights.rendezvous import RankReport
from rolloutbus.bus.wire.messages.weights import Offer
from rolloutbus.engine_worker.weights.staged import CannotFetch
from rolloutbus.engine_worker.weights.transports.landing import Landing
from rolloutbus.engine_worker.weights.transports.meeting import Meeting


def receive(offer: Offer, seat: tuple[int, int], place: Callable[[], Landing]) -> Landing:
    """Blocks until the bytes are in the memory that `place` makes, and verified.

    Args:
        offer: by the trainer.
        seat: rank, and ranks in all.
        place: raises CannotFetch where there is no room.

    Raises:
        CannotFetch: there was no broadcast, or it broke.
        EngineFailed: other bytes came than were published.
    """
    meeting = Meeting(offer.at, seat)
    try:
        landing = place()
    except CannotFetch as error:
        meeting.join(RankReport(problem=str(error)))  # or the others would wait for this rank
        raise
    meeting.join(RankReport(gpu=landing.gpu))
    meeting.receive(landing.pieces, offer.backend)
    wrong = landing.wrong()
    meeting.report(RankReport(problem=wrong.problem.message if wrong is not None else ""))
    if wrong is not None:
        raise wrong
    return landing
