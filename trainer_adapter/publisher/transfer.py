"""A version that is published in the background: how far it has come, and its result."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.wire.errors import RequestCancelled, cannot_be_pickled
from rolloutbus.bus.wire.messages.weights import UpdateProgress
from rolloutbus.trainer_adapter.publisher.published import Published

TransferPhase = Literal[
    "waiting",
    "copying",
    "sealing",
    "preparing",
    "recording",
    "committing",
    "committed",
    "aborted",
]


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """How far a version has come."""

    phase: TransferPhase = "waiting"
    """`waiting` for its turn, `copying` into the store, `sealing` there; then the router's:
    `preparing`, `recording`, `committing`; in the end `committed` or `aborted`."""
    version: int = 0
    """0 until the store has assigned it."""
    size_bytes: int = 0
    """Of the whole version; 0 until it is known."""
    copied_bytes: int = 0
    n_targets: int = 0
    """Workers that are to get it."""
    n_prepared: int = 0
    n_active: int = 0


class TransferLog:
    """The progress of one version, for its writer; readers wait for the next change."""

    def __init__(self) -> None:
        self.latest = TransferProgress()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self.copied = asyncio.Event()
        """Set once the tensors may change, or nothing will be read of them any more."""

    def enter(self, phase: TransferPhase, *, version: int = 0, size_bytes: int = 0) -> None:
        """A phase begins."""
        latest = self.latest
        self._put(
            replace(
                latest,
                phase=phase,
                version=version or latest.version,
                size_bytes=size_bytes or latest.size_bytes,
            )
        )

    def copied_so_far(self, n_bytes: int) -> None:
        """So many bytes have been copied; may be called in any thread."""
        self._loop.call_soon_threadsafe(self._copied, n_bytes)

    def routed(self, progress: UpdateProgress) -> None:
        """What the router reports."""
        self._put(
            replace(
                self.latest,
                phase=progress.phase,
                n_targets=progress.n_targets,
                n_prepared=progress.n_prepared,
                n_active=progress.n_active,
            )
        )

    async def changes(self, is_over: Callable[[], bool]) -> AsyncGenerator[TransferProgress]:
        """The progress now and after each change; a slow reader misses some, never the last."""
        told: TransferProgress | None = None
        while True:
            latest, changed = self.latest, self._changed
            if latest is not told:
                told = latest
                yield latest
            elif is_over():
                return
            else:
                await changed.wait()

    def end(self) -> None:
        """Nothing will change any more."""
        self.copied.set()
        self._changed.set()

    def _copied(self, n_bytes: int) -> None:
        # Calls of several threads may come out of order.
        if n_bytes > self.latest.copied_bytes:
            self._put(replace(self.latest, copied_bytes=n_bytes))

    def _put(self, progress: TransferProgress) -> None:
        if progress == self.latest:
            return  # a router tells it again to whoever asks again
        self.latest = progress
        self._changed.set()
        self._changed = asyncio.Event()


@strict()
class WeightTransferHandle:
    """A version on its way; `await` it for what it comes to.

    Any number of tasks may await it or read its progress. Cancelling one of them cancels only its
    waiting: the version goes on.
    """

    def __init__(
        self, log: TransferLog, task: "asyncio.Task[Published]", stop: Callable[[], None]
    ) -> None:
        """Only a `WeightPublisher` makes one."""
        self._log = log
        self._task = task
        self._stop = stop
        task.add_done_callback(lambda _: log.end())

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(self, "what it comes to: the Published of `await handle`")

    def __await__(self) -> Generator[Any, Any, Published]:
        """Wait until it is committed.

        Raises:
            As `WeightPublisher.publish`. RequestCancelled: `cancel` was in time.
        """
        return asyncio.shield(self._task).__await__()

    @property
    def progress(self) -> TransferProgress:
        """How far it has come."""
        return self._log.latest

    @property
    def is_done(self) -> bool:
        """Whether it has been committed, or failed."""
        return self._task.done()

    async def copied(self) -> None:
        """Wait until the tensors may change: the next training step may run.

        Raises:
            As awaiting the handle, if it has failed by then.
        """
        await self._log.copied.wait()
        if self._task.done():
            self._task.result()

    def changes(self) -> AsyncGenerator[TransferProgress]:
        """The progress now and after each change, until its end; a slow reader misses some."""
        return self._log.changes(self._task.done)

    async def cancel(self) -> bool:
        """End it, if that is still possible, and wait for its end.

        True: nothing was published, every worker keeps the old weights. False: too late, the
        commit was recorded and the version is the current one.

        Raises:
            As awaiting the handle: it failed for another reason.
        """
        self.stop()
        try:
            await self
        except RequestCancelled:
            return True
        return False

    def stop(self) -> None:
        """`cancel` without waiting for what comes of it."""
        if not self._task.done():
            self._task.add_done_callback(_take_note)
            self._stop()


def _take_note(task: "asyncio.Task[Published]") -> None:
    """Whoever wanted it stopped may not be there any more to hear how it ended."""
    if not task.cancelled():
        task.exception()
