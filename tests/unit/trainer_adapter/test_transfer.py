"""What whoever watches a version on its way is told."""

import pytest

from rolloutbus.bus.wire.messages.weights import UpdateProgress
from rolloutbus.trainer_adapter.publisher.transfer import TransferLog

PROGRESS = UpdateProgress(1, "preparing", n_targets=2, n_prepared=1, update="update-1")


async def test_progress_that_a_router_tells_again_is_no_change() -> None:
    log = TransferLog()
    changes = log.changes()
    log.routed(PROGRESS)
    assert (await anext(changes)).n_prepared == 1
    log.routed(PROGRESS)
    log.end()
    with pytest.raises(StopAsyncIteration):
        await anext(changes)
