"""What a `record_commit` changes: the version of a policy, its waves, or an adapter's.

Spec: docs/protocol.md, "Weights", 3 and 10; "More of an engine", 2.
"""

from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import RecordCommit
from rolloutbus.trainer_adapter.store import problems
from rolloutbus.trainer_adapter.store.versions import CommitRecord, StoredVersion, VersionTable


def record(table: VersionTable, ask: RecordCommit) -> list[CommitRecord] | Problem:
    """Change the table; returns what must be written down before it is answered, or why not."""
    stored = table.by_key.get((ask.policy, ask.version))
    is_there = stored is not None and stored.is_pullable
    last = table.committed.get(ask.policy, 0)
    if ask.version < last and not ask.is_adapter:
        return problems.older(ask.policy, ask.version, last)
    if not is_there and (ask.version or not ask.is_adapter):
        return problems.unavailable(ask.policy, ask.version)
    if ask.is_adapter:
        return _record_adapter(table, ask, stored)
    assert stored is not None
    are_over = not ask.floor and ask.policy in table.waves
    is_new = stored.state == "sealed"
    stored.on("commit")
    table.committed[ask.policy] = ask.version
    table.note_history(ask.policy, ask.version)
    if not (is_new or are_over):
        return []
    written = CommitRecord(*stored.key, last if ask.floor else 0, ask.floor)
    table.note_waves(written)
    return [written]


def _record_adapter(
    table: VersionTable, ask: RecordCommit, stored: StoredVersion | None
) -> list[CommitRecord]:
    if table.adapters.get(ask.policy, 0) == ask.version:
        return []
    if stored is not None:
        stored.on("commit")
        stored.is_adapter = True
    written = CommitRecord(ask.policy, ask.version, is_adapter=True)
    table.note_adapter(written)
    return [written]
