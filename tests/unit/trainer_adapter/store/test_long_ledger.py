"""A ledger that is shortened while its store lives means what it meant before."""

import asyncio
import random
from pathlib import Path

import msgspec

from rolloutbus.bus.actor.loop import BootClock
from rolloutbus.bus.weights.manifest import lay_out
from rolloutbus.trainer_adapter.store.contents import StoreContents
from rolloutbus.trainer_adapter.store.core import StoreCore
from rolloutbus.trainer_adapter.store.effect_runner import EffectRunner
from rolloutbus.trainer_adapter.store.effects import Persist
from rolloutbus.trainer_adapter.store.settings import StoreSettings
from rolloutbus.trainer_adapter.store.versions import (
    Asker,
    Assigned,
    CommitRecord,
    Record,
    Retired,
    Sealed,
    VersionTable,
)


def nobody_asks(asker: Asker, kind: str, body: msgspec.Struct) -> None:
    raise AssertionError((asker, kind, body))


def table_of(records: list[Record]) -> VersionTable:
    table = VersionTable()
    table.restore(records)
    return table


def some_records(chance: random.Random) -> list[Record]:
    """What a store might write down, of a policy and an adapter of it."""
    records: list[Record] = []
    held: list[tuple[str, int]] = []
    for version in range(1, 30):
        policy = chance.choice(["p", "p.adapter"])
        records.append(Assigned(policy, version))
        if chance.random() < 0.9:
            records.append(Sealed(policy, version, f"s{version}", [], chance.random() < 0.5))
            held.append((policy, version))
            if chance.random() < 0.7:
                is_adapter = policy != "p"
                tag = chance.choice([None, version]) if not is_adapter else None
                waves = chance.choice([(0, 0), (version - 1, 2)]) if not is_adapter else (0, 0)
                commit = CommitRecord(policy, version, *waves, is_adapter=is_adapter, tag=tag)
                records.append(commit)
        if chance.random() < 0.1:
            records.append(CommitRecord("p.adapter", 0, is_adapter=True))
        if len(held) > 2 and chance.random() < 0.7:
            records.append(Retired(*held.pop(chance.randrange(len(held)))))
    return records


def test_what_is_written_after_a_shortening_means_what_it_would_have_meant(seed: int) -> None:
    for number in range(20):
        records = some_records(random.Random(seed + number))
        whole = vars(table_of(records))
        for cut in range(len(records)):
            shortened = [*table_of(records[:cut]).snapshot(), *records[cut:]]
            assert vars(table_of(shortened)) == whole, (seed + number, cut)


async def test_a_living_store_shortens_its_ledger_and_what_it_writes_meanwhile_stays(
    tmp_path: Path,
) -> None:
    (tmp_path / "shm").mkdir()
    contents = StoreContents(tmp_path / "store", tmp_path / "shm")
    layout = lay_out([(f"model.layers.{place}.weight", "F32", (16,)) for place in range(20_000)])
    version = 0
    while not contents.ledger.is_long:
        version += 1
        contents.ledger.append(Sealed("p", version, "segment", layout), Retired("p", version))
    long_bytes = contents.ledger.path.stat().st_size
    settings = StoreSettings(router="ipc:///router", directory=str(tmp_path / "store"))
    core = StoreCore(settings, "host", VersionTable())
    runner = EffectRunner(core, contents, BootClock(), answer=nobody_asks)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        runner.start(tasks)
        runner.run([Persist(Assigned("before", 1)), Persist(Assigned("before", 2))])
        runner.collect()
        runner.run([Persist(Assigned("after", 3)), Persist(CommitRecord("after", 3))])
        runner.collect()
    runner.close()
    assert contents.ledger.path.stat().st_size < long_bytes / 10
    contents.close()
    again = StoreContents(tmp_path / "store", tmp_path / "shm")
    assert again.table.assigned == {"before": 2, "after": 3}
    assert again.table.committed == {"after": 3}
    again.close()
