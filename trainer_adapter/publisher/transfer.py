"""A publication as its caller sees it: options, progress, result."""

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NoReturn, TypedDict

from rolloutbus.bus.strict_calls import Spelled, strict
from rolloutbus.bus.wire.errors import BusError, Refused, RequestCancelled, cannot_be_pickled
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.bus.wire.messages.weights import (
    InFlight,
    TransportChoice,
    UpdateMode,
    UpdateProgress,
)
from rolloutbus.bus.wire.messages.weights import VersionPublished as PublishedByRouter
from rolloutbus.bus.wire.versions import MAX_VERSION

UPDATE_DEADLINE_S = 120.0
Requirement = Annotated[
    str,
    Spelled(
        re.compile(r"all|quorum|any|at-least:[1-9][0-9]{0,8}"), "all, quorum, any or at-least:N"
    ),
]


class RestoreOptions(TypedDict, total=False):
    """The options of `WeightPublisher.restore`."""

    in_flight: InFlight
    require: Requirement
    transport: TransportChoice
    mode: UpdateMode
    floor: int
    tag: int | None
    deadline_s: float


class PublishOptions(RestoreOptions, total=False):
    """The options of `WeightPublisher.publish`, which explains them."""

    allow_zeros: bool
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions:
    """The same with their defaults, checked.

    Raises:
        Refused: `floor`, `version`, `tag` or `deadline_s` is no valid value; `.field` names it.
    """

    in_flight: InFlight = "keep"
    require: Requirement = "any"
    transport: TransportChoice = "auto"
    mode: UpdateMode = "staged"
    floor: int = 0
    allow_zeros: bool = False
    version: int = 0
    tag: int | None = None
    deadline_s: float = UPDATE_DEADLINE_S

    def __post_init__(self) -> None:
        if self.floor < 0:
            message = f"a number of workers is not below 0: {self.floor}"
            raise Refused(bad_request("floor", message))
        if not 0 <= self.version < MAX_VERSION:
            message = (
                f"a version is a number above 0 and below {MAX_VERSION}, or 0 for the next one: "
                f"{self.version}"
            )
            raise Refused(bad_request("version", message))
        if self.tag is not None and not 0 <= self.tag <= MAX_VERSION:
            message = f"a tag is a number from 0 to {MAX_VERSION}, such as a step; not {self.tag}"
            raise Refused(bad_request("tag", message))
        if not 0 < self.deadline_s < math.inf:
            message = f"a deadline is a number of seconds above 0, not {self.deadline_s}"
            raise Refused(bad_request("deadline_s", message))


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is committed: new requests are served with it."""

    version: int
    stall_ms: dict[str, float]
    """Worker -> how long it could not generate because of the swap; active workers only."""
    quarantined: dict[str, str]
    """Worker -> why it is not active; it gets no requests until it has caught up."""
    write_s: float
    """Copying the tensors into the store and verifying them, seconds."""
    update_s: float
    """Bringing them to the workers, from sealed to committed, seconds."""
    transport: dict[str, str] = field(default_factory=dict[str, str])
    """Worker -> by which way it got the bytes; active workers only."""
    why: dict[str, str] = field(default_factory=dict[str, str])
    """Worker -> why that way, where the router said so."""
    moved_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Worker -> bytes that crossed a link for it."""


@dataclass(frozen=True, slots=True)
class PublishedLora:
    """An adapter that requests may name from now on."""

    name: str
    version: int
    """`lora=NAME` gets the latest, `lora=NAME@VERSION` this one."""
    workers: tuple[str, ...]
    """Those that have it."""
    problems: dict[str, BusError] = field(default_factory=dict[str, BusError])
    """Worker -> why it has not."""


def published_of(result: PublishedByRouter, write_s: float, update_s: float) -> Published:
    """The caller's view of the router's answer."""
    active = [each for each in result.workers if each.is_active]
    return Published(
        version=result.version,
        stall_ms={each.worker: each.stall_ms for each in active},
        quarantined={each.worker: each.problem for each in result.workers if not each.is_active},
        write_s=write_s,
        update_s=update_s,
        transport={each.worker: each.transport for each in active},
        why={each.worker: each.why for each in result.workers if each.why},
        moved_bytes={each.worker: each.moved_bytes for each in active},
    )


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
        self._has_ended = False
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

    async def changes(self) -> AsyncGenerator[TransferProgress]:
        """The progress now and after each change; a slow reader misses some, never the last."""
        reported: TransferProgress | None = None
        while True:
            latest, changed = self.latest, self._changed
            if latest is not reported:
                reported = latest
                yield latest
            elif self._has_ended:
                return
            else:
                await changed.wait()

    def end(self) -> None:
        """Nothing will change any more."""
        self._has_ended = True
        self.copied.set()
        self._changed.set()

    def _copied(self, n_bytes: int) -> None:
        # Calls of several threads may come out of order.
        if n_bytes > self.latest.copied_bytes:
            self._put(replace(self.latest, copied_bytes=n_bytes))

    def _put(self, progress: TransferProgress) -> None:
        if progress == self.latest:
            return  # a router reports again to a client that asks again
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
        self,
        log: TransferLog,
        run: Callable[[], Awaitable[Published]],
        stop_at_router: Callable[[], bool],
    ) -> None:
        """Only a `WeightPublisher` makes one.

        Args:
            log: the progress of `run`.
            run: the whole publication.
            stop_at_router: ends it there; returns False while the router does not have it.
        """
        self._log = log
        self._stop_at_router = stop_at_router
        self._has_begun = self._was_stopped = False
        self._task = asyncio.create_task(self._carry_out(run))
        self._task.add_done_callback(lambda _: log.end())

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
            BusError: as awaiting the handle, if it has failed by then.
        """
        await self._log.copied.wait()
        if self._task.done():
            self._task.result()

    def changes(self) -> AsyncGenerator[TransferProgress]:
        """The progress now and after each change, until its end; a slow reader misses some."""
        return self._log.changes()

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
        if self._task.done():
            return
        self._task.add_done_callback(_retrieve_error)
        if not self._stop_at_router():
            self._was_stopped = True
            if self._has_begun:  # else it would end without a word to other ranks
                self._task.cancel()

    async def _carry_out(self, run: Callable[[], Awaitable[Published]]) -> Published:
        self._has_begun = True
        if self._was_stopped:
            self._task.cancel()
        try:
            return await run()
        except asyncio.CancelledError:
            if not self._was_stopped:
                raise
            message = "cancelled before the router had it; nothing was published"
            raise RequestCancelled(Problem("cancelled", message, "not_started")) from None
        finally:
            if self._log.latest.phase != "committed":
                self._log.enter("aborted")


def _retrieve_error(task: "asyncio.Task[Published]") -> None:
    """The caller that stopped it may not wait for its end: asyncio would log the error."""
    if not task.cancelled():
        task.exception()
