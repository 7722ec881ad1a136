"""Carries out the effects of the store's core; work for a disk and hashing goes to threads."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, cast

import msgspec

from rolloutbus.bus.actor.loop import Clock
from rolloutbus.bus.actor.process import warn
from rolloutbus.bus.weights import weight_delta as delta
from rolloutbus.bus.weights.manifest import Bytes
from rolloutbus.bus.weights.side_by_side import first_mismatch
from rolloutbus.bus.wire.messages.endings import Done
from rolloutbus.bus.wire.messages.weights import Chunk
from rolloutbus.trainer_adapter.store import problems
from rolloutbus.trainer_adapter.store.contents import StoreContents
from rolloutbus.trainer_adapter.store.core import MemberCommand, StoreCore
from rolloutbus.trainer_adapter.store.effects import (
    Allocate,
    ForgetDelta,
    Freeze,
    MakeAhead,
    MakeDelta,
    Persist,
    Release,
    RemoveFiles,
    SendDeltaChunk,
    SendSegmentChunk,
    StoreAnswer,
    StoreEffect,
    Verify,
    VerifyEarly,
    WriteChunk,
    WriteFiles,
)
from rolloutbus.trainer_adapter.store.ledger import LedgerUnsure
from rolloutbus.trainer_adapter.store.segments import StoreFull
from rolloutbus.trainer_adapter.store.versions import Asker, DeltaKey, Record, Retired, VersionKey

_IN_ORDER = (Persist, Allocate, Verify, Release)
"""Run in a thread, and what comes after them waits."""

LAST_FILES_S = 2.0
"""A version that is being written when the store leaves is given up after so long."""

R = TypeVar("R")


class _Closed(Exception):
    """The threads are gone."""


async def _until_closed(work: Coroutine[Any, Any, object]) -> None:
    with contextlib.suppress(_Closed):
        await work


class EffectRunner:
    """Lives on one event loop; use `close` at the end."""

    def __init__(
        self,
        core: StoreCore,
        contents: StoreContents,
        clock: Clock,
        answer: Callable[[Asker, str, msgspec.Struct], None],
    ) -> None:
        """`answer` sends an entry of this kind, with this body, to the asker."""
        self._core = core
        self._contents = contents
        self._clock = clock
        self._answer = answer
        self._deltas: dict[DeltaKey, Bytes] = {}
        self._writes: set[asyncio.Task[None]] = set()
        """Of files, waiting ones too."""
        self._is_leaving = False
        self._is_closed = False
        # One thread: appends to the ledger keep their order, and the pool needs no lock.
        self._disk = ThreadPoolExecutor(1, "store-disk")
        # Another one, in which minutes may go by.
        self._files = ThreadPoolExecutor(1, "store-files")

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """`tasks` waits for all work in threads."""
        self._tasks = tasks

    async def finish(self) -> None:
        """The store is about to leave: end what ends soon, give up what may take minutes."""
        self._is_leaving = True
        if self._writes:
            await asyncio.wait(self._writes, timeout=LAST_FILES_S)

    def close(self) -> None:
        """Wait for what is being written down; idempotent.

        What was to follow is not begun: the next store finds what is left of it.
        """
        self._is_closed = True
        if self._contents.files is not None:
            self._contents.files.close()
        self._disk.shutdown()
        self._files.shutdown(cancel_futures=True)

    def collect(self) -> None:
        """Look after segments that readers have let go, and after the length of the ledger."""
        self._begin(self._on_disk(self._contents.pool.collect))
        if self._contents.ledger.is_long:
            self._begin(self._on_disk(self._contents.shorten))
        if self._contents.trouble:
            self._begin(self._try_make_room())

    def handle(self, asker: Asker, command: MemberCommand) -> None:
        """Have the core decide on a command, as soon as there is room to write that down.

        What was decided and not written down would be forgotten by the next store.
        """
        self._begin(self._handle(asker, command))

    async def _handle(self, asker: Asker, command: MemberCommand) -> None:
        try:
            size_bytes = self._contents.record_bytes(command)
            await self._on_disk(self._contents.make_room, size_bytes)
        except OSError:
            self._answer(asker, "failed", problems.unwritable(self._contents.trouble))
            return
        self.run(self._core.handle(asker, command, self._clock.now()))

    async def _try_make_room(self) -> None:
        with contextlib.suppress(OSError):
            await self._on_disk(self._contents.make_room)

    async def _persist(self, record: Record) -> None:
        try:
            await self._on_disk(self._contents.ledger.append, record)
        except OSError as error:
            if isinstance(record, Retired):
                warn(f"{self._contents.ledger.path}: {error.strerror}")
                return  # the next store finds that its bytes are gone
            # Others must not act on it, and it may be there all the same: the next store reads.
            raise LedgerUnsure(self._contents.ledger.path, error) from error

    def run(self, effects: Sequence[StoreEffect]) -> None:
        """Carry them out in order; returns before the slow ones are done."""
        for position, effect in enumerate(effects):
            if isinstance(effect, _IN_ORDER):
                self._begin(self._run_slowly(effects[position:]))
                return
            self._run_now(effect)

    def _run_now(self, effect: StoreEffect) -> None:
        pool = self._contents.pool
        match effect:
            case StoreAnswer(asker, kind, body):
                self._answer(asker, kind, body)
            case Freeze(segment):
                pool.freeze(segment)
            case SendSegmentChunk(asker, segment, offset, size_bytes):
                self._send_chunk(asker, pool.content(segment), offset, size_bytes)
            case SendDeltaChunk(asker, key, offset, size_bytes):
                self._send_chunk(asker, self._deltas[key], offset, size_bytes)
            case WriteChunk(asker, segment, offset, content):
                target = pool.content(segment).data
                target[offset : offset + len(content)] = content
                self._answer(asker, "finished", Done())
            case VerifyEarly():
                self._begin(self._verify_early(effect))
            case MakeAhead(size_bytes):
                self._begin(self._make_ahead(size_bytes))
            case MakeDelta():
                self._begin(self._make_delta(effect))
            case ForgetDelta(key):
                self._deltas.pop(key, None)
            case WriteFiles():
                write = self._begin(self._write_files(effect))
                self._writes.add(write)
                write.add_done_callback(self._writes.discard)
            case RemoveFiles(key):
                self._begin(self._remove_files(key))
            case _:
                raise AssertionError(effect)

    async def _run_slowly(self, effects: Sequence[StoreEffect]) -> None:
        pool = self._contents.pool
        for effect in effects:
            match effect:
                case Persist(record):
                    await self._persist(record)
                case Release(segment, is_reusable):
                    await self._on_disk(partial(pool.retire, segment, is_reusable=is_reusable))
                case Allocate(key, size_bytes):
                    try:
                        segment = await self._on_disk(pool.take, size_bytes)
                    except StoreFull as error:
                        self.run(self._core.allocation_failed(key, str(error)))
                    else:
                        self.run(self._core.allocated(key, segment, self._clock.now()))
                case Verify(key, segment, tensors):
                    content = pool.content(segment)
                    wrong = await asyncio.to_thread(first_mismatch, content, tensors)
                    if self._is_leaving:
                        return  # it could not be written down
                    name = "" if wrong is None else wrong.name
                    self.run(self._core.verified(key, name, self._clock.now()))
                case _:
                    self._run_now(effect)

    async def _verify_early(self, ask: VerifyEarly) -> None:
        content = self._contents.pool.content(ask.segment)
        wrong = await asyncio.to_thread(first_mismatch, content, [*ask.tensors.values()])
        if self._is_leaving:
            return
        self.run(self._core.verified_early(ask.key, ask.tensors, is_right=wrong is None))

    async def _make_ahead(self, size_bytes: int) -> None:
        # Bit by bit: what is to be written down meanwhile must not wait.
        while not self._is_leaving and await self._on_disk(
            self._contents.pool.make_ahead, size_bytes
        ):
            pass

    async def _make_delta(self, ask: MakeDelta) -> None:
        pool = self._contents.pool
        base, content = pool.content(ask.base_segment), pool.content(ask.segment)
        made = await asyncio.to_thread(delta.encode, base, ask.base_tensors, content, ask.tensors)
        now = self._clock.now()
        if made is None:
            self.run(self._core.delta_made(ask.key, None, 0, now))
            return
        self._deltas[ask.key] = made.content
        self.run(self._core.delta_made(ask.key, made.parts, len(made.content), now))

    async def _write_files(self, ask: WriteFiles) -> None:
        files = self._contents.files
        assert files is not None
        content = self._contents.pool.content(ask.segment)
        try:
            at = await self._among_files(files.write, ask.key, ask.tensors, content)
        except OSError as error:
            # The version lives without them: files are a second way to it.
            warn(f"version {ask.key[1]} of policy {ask.key[0]!r} is not on disk: {error}")
            at = ""
        self.run(self._core.files_written(at))

    async def _remove_files(self, key: VersionKey) -> None:
        files = self._contents.files
        if files is None:
            return
        try:
            await self._among_files(files.remove, key)
        except OSError as error:
            warn(f"version {key[1]} of policy {key[0]!r} stays on disk: {error}")

    def _send_chunk(self, asker: Asker, whole: Bytes, offset: int, size_bytes: int) -> None:
        # Encoded at once, so the view is as good as the bytes, and saves a copy of them.
        view = cast("bytes", whole.data[offset : offset + size_bytes])
        self._answer(asker, "chunk", Chunk(offset=offset, content=view))

    def _begin(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        return self._tasks.create_task(_until_closed(work))

    async def _on_disk(self, call: Callable[..., R], *args: object) -> R:
        if self._is_closed:
            raise _Closed
        return await asyncio.get_running_loop().run_in_executor(self._disk, call, *args)

    async def _among_files(self, call: Callable[..., R], *args: object) -> R:
        if self._is_closed:
            raise _Closed
        return await asyncio.get_running_loop().run_in_executor(self._files, call, *args)
