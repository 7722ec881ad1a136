"""What a relay keeps in memory, and for how long."""

import weakref

import numpy as np

from rolloutbus.bus.weights.manifest import Bytes, lay_out
from rolloutbus.bus.wire.messages.weights import Manifest
from rolloutbus.engine_worker.weights.buffers import SpareBuffer
from rolloutbus.engine_worker.weights.relay import MAX_HELD, Relay

TENSORS = lay_out([("a", "U8", (100,))])


def manifest(version: int) -> Manifest:
    return Manifest("default", version, "host", "segment", 100, TENSORS)


def hold(relay: Relay, version: int) -> weakref.ref[Bytes]:
    content = np.zeros(100, np.uint8)
    relay.hold(manifest(version), content)
    return weakref.ref(content)


def test_no_more_versions_are_kept_than_a_worker_can_have() -> None:
    relay = Relay()
    buffers = [hold(relay, version) for version in range(1, 2 * MAX_HELD + 1)]
    assert [buffer() is not None for buffer in buffers] == [False] * MAX_HELD + [True] * MAX_HELD


def test_a_buffer_that_is_given_up_is_not_kept_for_its_readers() -> None:
    relay = Relay()
    spare = SpareBuffer(relay.forget)
    content = spare.take(100)
    buffer = weakref.ref(content)
    relay.hold(manifest(1), content)
    spare.give_back(content)
    del content
    assert buffer() is not None
    spare.clear()
    assert buffer() is None
