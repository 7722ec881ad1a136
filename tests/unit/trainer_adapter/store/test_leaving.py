"""A store that leaves begins nothing more; one whose disk fails goes on."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from rolloutbus.bus.actor.loop import BootClock
from rolloutbus.trainer_adapter.store.contents import StoreContents
from rolloutbus.trainer_adapter.store.core import StoreCore
from rolloutbus.trainer_adapter.store.effect_runner import EffectRunner
from rolloutbus.trainer_adapter.store.effects import Persist, Release, RemoveFiles
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


async def test_a_version_that_the_disk_will_not_let_go_stays_and_the_store_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shm").mkdir()
    contents = StoreContents(tmp_path / "store", tmp_path / "shm", str(tmp_path / "disk"))
    (tmp_path / "disk/default").touch()  # where a directory should be
    settings = StoreSettings(router="ipc:///router", directory=str(tmp_path / "store"))
    core = StoreCore(settings, "host", VersionTable())
    runner = EffectRunner(core, contents, BootClock(), answer=nobody_asks)
    async with asyncio.TaskGroup() as tasks:  # would raise what any of them raises
        runner.start(tasks)
        runner.run([RemoveFiles(("default", 3))])
    runner.close()
    contents.close()
    assert "version 3 of policy 'default' stays on disk" in capfd.readouterr().err
