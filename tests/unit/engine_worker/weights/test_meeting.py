"""A worker at the rendezvous of a broadcast."""

import asyncio

import pytest

from rolloutbus.bus.weights.rank_group import (
    KeptGroup,
    RankReport,
    done_key,
    joined_key,
    read_report,
)
from rolloutbus.engine_worker.weights.staged import CannotFetch
from rolloutbus.engine_worker.weights.transports.broadcast import WorkerRendezvous
from rolloutbus.trainer_adapter.publisher.collective import Rendezvous

PATIENCE_S = 240.0


def test_a_worker_that_hears_why_nothing_is_sent_says_that_it_has() -> None:
    async def meet() -> RankReport:
        rendezvous = Rendezvous("127.0.0.1", PATIENCE_S)
        keys = rendezvous.client()
        at = f"{rendezvous.host}:{rendezvous.port}"
        meeting = WorkerRendezvous(at, "gloo", (1, 2), KeptGroup())
        meeting.join()
        assert keys.check([joined_key(1)])
        rendezvous.go("two ranks on one GPU")
        rendezvous.go("only the first word counts")
        with pytest.raises(CannotFetch, match="two ranks on one GPU"):
            await asyncio.to_thread(meeting.receive, [])
        await rendezvous.heard([RankReport(), RankReport(problem="was not there")])
        return read_report(keys.get(done_key(1)))

    report = asyncio.run(asyncio.wait_for(meet(), PATIENCE_S))
    assert report.problem == "two ranks on one GPU"
