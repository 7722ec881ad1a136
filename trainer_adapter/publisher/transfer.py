"""A version that is published in the background: how far it has come, and its result."""

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NoReturn, TypedDict

from rolloutbus.bus.strict_calls import Spelled, strict
from rolloutbus.bus.wire.errors import BusError, Refused, RequestCancelled, cannot_be_pickled
from rolloutbus.bus.wire.messages.endings import bad_request
from rolloutbus.bus.wire.messages.weights import (
    InFlight,
    PublishVersion,
    TransportChoice,
    UpdateMode,
    UpdateProgress,
)
from rolloutbus.bus.wire.messages.weights import VersionPublished as PublishedByRouter

UPDATE_DEADLINE_S = 120.0
_RULE = re.compile(r"all|quorum|any|at-least:[1-9][0-9]{0,8}")


Requirement = Annotated[str, Spelled(_RULE, "all, quorum, any or at-least:N")]


class RestoreOptions(TypedDict, total=False):
    """All keyword parameters of `WeightPublisher.restore`, to hand them on as one."""

    in_flight: InFlight
    require: Requirement
    transport: TransportChoice
    mode: UpdateMode
    floor: int
    deadline_s: float


class PublishOptions(RestoreOptions, total=False):
    """Those of `WeightPublisher.publish`."""

    allow_zeros: bool


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


def publish_command(policy: str, version: int, options: PublishOptions) -> PublishVersion:
    """The router's command.

    Raises:
        Refused: `require`, `floor` or `deadline_s` is no valid value; `.field` names it.
    """
    require, floor = options.get("require", "any"), options.get("floor", 0)
    deadline_s = options.get("deadline_s", UPDATE_DEADLINE_S)
    if _RULE.fullmatch(require) is None:
        message = f"{require!r} is not one of all, quorum, any, at-least:N"
        raise Refused(bad_request("require", message))
    if floor < 0:
        raise Refused(bad_request("floor", f"a number of workers is not below 0: {floor}"))
    if not 0 < deadline_s < math.inf:
        message = f"a deadline is a number of seconds above 0, not {deadline_s}"
        raise Refused(bad_request("deadline_s", message))
    return PublishVersion(
        policy=policy,
        version=version,
        in_flight=options.get("in_flight", "keep"),
        require=require,
        transport=options.get("transport", "auto"),
        mode=options.get("mode", "staged"),
        floor=floor,
    )


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
