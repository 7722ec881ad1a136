"""A store that leaves ends what it is at, and begins nothing more."""

import asyncio
from pathlib import Path

import msgspec

from rolloutbus.bus.actor.loop import BootClock
from rolloutbus.trainer_adapter.store.contents import StoreContents
from rolloutbus.trainer_adapter.store.core import StoreCore
from rolloutbus.trainer_adapter.store.effect_runner import EffectRunner
from rolloutbus.trainer_adapter.store.effects import Persist, Release
from rolloutbus.trainer_adapter.store.settings import StoreSettings
from rolloutbus.trainer_adapter.store.versions import Asker, Assigned, VersionTable


def nobody_asks(asker: Asker, kind: str, body: msgspec.Struct) -> None:
    raise AssertionError((asker, kind, body))


async def test_what_was_to_follow_when_the_store_leaves_is_not_begun(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    contents = StoreContents(tmp_path / "store", tmp_path / "shm")
    settings = StoreSettings(router="ipc:///router", directory=str(tmp_path / "store"))
    core = StoreCore(settings, "host", VersionTable())
    runner = EffectRunner(core, contents, BootClock(), answer=nobody_asks)
    segment = contents.pool.take(64)
    async with asyncio.TaskGroup() as tasks:  # would raise what any of them raises
        runner.start(tasks)
        runner.run([Persist(Assigned("default", 1)), Release(segment, is_reusable=False)])
        await asyncio.sleep(0)  # the first one is handed to its thread
        await runner.finish()
        runner.close()
        runner.run([Persist(Assigned("default", 2))])
        runner.collect()
    contents.close()
