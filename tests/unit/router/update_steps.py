"""The steps of a weight update, as its members play them."""

from rolloutbus.bus.wire.codec import unpack, unpack_result
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.weights import (
    Committed,
    Prepared,
    PrepareUpdate,
    PublishVersion,
    UpdateProgress,
    VersionPublished,
)
from tests.unit.router.harness import SimClient, SimStore, SimWorker

FAILED = Problem("digest_mismatch", "a tensor differs", "failed")


def publish(client: SimClient, version: int = 1, *, rid: str = "", **rules: object) -> str:
    """Ask for an update; returns its rid. `rules` are fields of `PublishVersion`."""
    body = PublishVersion("default", version, **rules)  # type: ignore[arg-type]
    return client.ask("publish_version", body, deadline_s=30, rid=rid)


def prepare(worker: SimWorker, version: int = 1) -> PrepareUpdate:
    """Stage it as told; returns what was told."""
    command = worker.heard_one("prepare_update")
    ask = unpack(command)
    assert isinstance(ask, PrepareUpdate)
    worker.end(command, body=Prepared(version, 64, ask.transport, 1.0, 32))
    return ask


def fail_to_prepare(worker: SimWorker) -> None:
    """The bytes are wrong."""
    worker.end(worker.heard_one("prepare_update"), "failed", FAILED)


def record(store: SimStore) -> None:
    """Write the decision down."""
    store.end(store.heard_one("record_commit"), body=Done())


def commit(worker: SimWorker, version: int = 1) -> None:
    """Swap."""
    worker.version = version
    worker.end(worker.heard_one("commit_update"), body=Committed(version, 2.5))


def published(client: SimClient) -> VersionPublished:
    """How the only publication that ended went."""
    (entry,) = client.take("finished")
    body = unpack_result("publish_version", entry)
    assert isinstance(body, VersionPublished)
    return body


def progress(client: SimClient) -> list[UpdateProgress]:
    """What the publisher was told on the way."""
    told = [unpack(entry) for entry in client.take("update_progress")]
    return [body for body in told if isinstance(body, UpdateProgress)]
