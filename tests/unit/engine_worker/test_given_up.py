"""A version that nobody wants any more while it is on its way to a worker."""

import asyncio
from pathlib import Path

import pytest

from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.weights import PrepareUpdate
from rolloutbus.engine_worker.weights.receiver import WeightReceiver, ways_of_this_host


@pytest.mark.parametrize("step", ["prepare", "manifest"])
def test_transfer_ends_at_once_when_its_version_is_given_up(tmp_path: Path, step: str) -> None:
    async def give_up() -> str:
        receiver = WeightReceiver([], ways_of_this_host())
        ask = PrepareUpdate("default", 1, f"ipc://{tmp_path}/nobody")
        transfer = asyncio.create_task(getattr(receiver, step)(ask, timeout_s=600))
        await asyncio.sleep(0)  # it asks for the manifest, and nobody answers
        receiver.give_up(1)
        with pytest.raises(EngineFailed) as failure:
            await transfer
        receiver.close()
        return failure.value.problem.message

    assert asyncio.run(asyncio.wait_for(give_up(), 240)) == "version 1 was given up on its way"
