"""What a test asks of the router about sessions."""

from rolloutbus.bus.wire.codec import unpack, unpack_result
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.messages.generation import (
    CloseSession,
    OpenedSession,
    OpenSession,
    SessionMoved,
)
from tests.unit.router.harness import Bus, SimClient, SimWorker

HOUR_S = 3600.0


def opened(client: SimClient, session: str = "agent", **fields: float | str) -> str:
    """Open a session; the worker that has it."""
    client.ask("open_session", OpenSession(session, **fields))  # type: ignore[arg-type]
    (ending,) = client.take("finished")
    body = unpack_result("open_session", ending)
    assert isinstance(body, OpenedSession)
    return body.worker


def refused(client: SimClient, session: str = "agent", **fields: float | str) -> str:
    """Try to open a session; why it is refused."""
    client.ask("open_session", OpenSession(session, **fields))  # type: ignore[arg-type]
    return client.problem().code


def closed(client: SimClient, session: str = "agent") -> tuple[str, str]:
    client.ask("close_session", CloseSession(session))
    return client.ending()


def moves(client: SimClient) -> list[tuple[str, str, str]]:
    """(from, to, reason) of every move that the client was told."""
    found = [unpack(entry) for entry in client.take("session_moved")]
    return [
        (each.from_worker, each.to_worker, each.reason)
        for each in found
        if isinstance(each, SessionMoved)
    ]


def sessions(bus: Bus) -> dict[str, int]:
    return bus.core.status(bus.now).sessions


def turn(client: SimClient, worker: SimWorker, session: str = "agent") -> None:
    """A request of the session, from submission to the client's ack, at this worker."""
    rid = client.generate(session=session)
    (command,) = [each for each in worker.take("generate") if each.rid == rid]
    worker.accept(command)
    worker.end(command)
    client.acknowledge(client.heard_one("finished"))


def full(bus: Bus, client: SimClient, worker: SimWorker, n_waiting: int = 20) -> list[Entry]:
    """As many requests as the worker takes at once, and `n_waiting` more; those it took."""
    for _ in range(6 + n_waiting):
        client.generate(deadline_s=HOUR_S)
    taken = worker.take("generate")
    worker.accept(*taken)
    assert bus.core.status(bus.now).n_queued == n_waiting
    return taken
