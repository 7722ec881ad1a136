"""A writer in a process of its own: appends for ever, and says what it calls durable.

Arguments: directory, and how many bytes a file may have (0: any number).
"""

import asyncio
import resource
import sys
from pathlib import Path

from rolloutbus.bus.wire.entry import Entry
from rolloutbus.replay.journal.core import JournalSettings
from rolloutbus.replay.journal.records import Stream
from rolloutbus.replay.journal.writer import JournalWriter

SETTINGS = JournalSettings(sync_s=0.002, sync_bytes=20_000, segment_bytes=200_000)
TOPIC = bytes(range(256)) * 3


async def main() -> None:
    directory, limit_bytes = Path(sys.argv[1]), int(sys.argv[2])
    if limit_bytes:  # as a full disk: the write that goes beyond fails
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    ended = asyncio.Event()

    async with JournalWriter(directory, SETTINGS, on_problem=lambda _: ended.set()) as journal:
        print("durable", journal.core.durable, flush=True)
        told = journal.core.durable
        while not ended.is_set():
            journal.append(lambda n, at: Stream(n, at, TOPIC, [Entry("idle", f"c/{n}")]))
            await asyncio.sleep(0)  # the writer's turn
            if journal.core.durable != told:
                told = journal.core.durable
                print("durable", told, flush=True)
        print("durable", journal.core.durable, flush=True)
        print("problem", journal.core.problem, flush=True)


asyncio.run(main())
