"""Detached requests of clients that were killed: which of them somebody must have the end of.

Kept in memory, they may be lost with the router, or with the worker that has their end. Whoever
was killed a moment after asking may not have been heard at all. Nothing else excuses their loss.
"""

from collections.abc import Iterable, Sequence

from tests.drills.chaos.history import Life
from tests.drills.chaos.records import Looked
from tests.drills.chaos.recovery import Struck
from tests.drills.chaos.schedule import ROUTER_KINDS

HEARD_S = 2.0
"""A request that was asked for so long before its client's death was taken by the router."""
COLLECTED_S = 5.0
"""From the list of what there is until all of that is collected."""
DANGEROUS = ROUTER_KINDS | {"kill_worker", "partition_worker", "stop_worker", "partition_client"}


def note_owed(lives: Iterable[Life], looks: Sequence[Looked], struck: Sequence[Struck]) -> None:
    """Mark the requests that a killed client's successors must have collected."""
    deaths = [each.at for each in struck if each.kind == "kill_client"]
    dangers = [each for each in struck if each.kind in DANGEROUS]
    for life in lives:
        for asked in life.invoked:
            died_at = min((at for at in deaths if at > asked.at), default=None)
            name = asked.op.partition(":")[0]
            looked_at = max((each.at for each in looks if each.op == name), default=0.0)
            if not (asked.is_detached and life.is_excused and died_at and looked_at > died_at):
                continue
            begin, end = asked.at - HEARD_S, looked_at + COLLECTED_S
            is_endangered = any(each.at < end and each.until > begin for each in dangers)
            was_heard = bool(life.progressed) or died_at - asked.at > HEARD_S
            life.is_owed = was_heard and not is_endangered
