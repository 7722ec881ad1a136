"""The router sends again as the settings say, which all sides obey."""

import pytest

from rolloutbus.bus.settings import LeaseSettings
from rolloutbus.bus.wire.messages.control import Pause
from tests.unit.router.harness import TICK_S, Bus, SimWorker

TRIPLING = LeaseSettings(resend_first_s=0.5, resend_factor=3.0, resend_max_s=4.0)
DUE_S = [0.0, 0.5, 2.0, 6.0, 10.0, 14.0]
"""First at once, then after 0.5 s, 1.5 s, and no more than 4 s."""


def _sent_at(bus: Bus, worker: SimWorker, kind: str) -> list[float]:
    """Seconds after the first one at which a worker that never answers is sent a command."""
    sent_at = [0.0] * len(worker.take(kind))
    began_at = bus.now
    while bus.now - began_at < 16:
        bus.advance(TICK_S)
        worker.heartbeat()
        sent_at += [bus.now - began_at] * len(worker.take(kind))
    return sent_at


def test_a_request_that_its_worker_does_not_confirm() -> None:
    bus = Bus(leases=TRIPLING)
    worker, client = bus.worker(), bus.client()
    client.generate(deadline_s=1000)
    assert _sent_at(bus, worker, "generate") == pytest.approx(DUE_S, abs=TICK_S)


def test_a_member_command_that_is_not_taken_up() -> None:
    bus = Bus(leases=TRIPLING)
    worker, client = bus.worker(), bus.client()
    client.ask("pause", Pause("in_place"), "fleet", deadline_s=1000)
    assert _sent_at(bus, worker, "pause") == pytest.approx(DUE_S, abs=TICK_S)
