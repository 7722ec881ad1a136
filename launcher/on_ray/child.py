"""A process of a fleet in a Ray actor, as the supervisor in this program sees it.

Each incarnation has an actor of its own, which Ray never restarts: when it is lost, the supervisor
starts the next one, and Ray finds a place for it.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from rolloutbus.bus.actor.child import OnNotice, OnProgress, OnReady
from rolloutbus.bus.actor.process import COMPLAINT, ActorExit
from rolloutbus.bus.wire.errors import ProcessFailed
from rolloutbus.launcher.on_ray.host import GpuHolder, Order, Place, ProcessHost, Report

PLACED_AFTER_S = 10.0
"""An actor that has no place for so long is told of, again and again at longer intervals."""
UNAVAILABLE_S = 0.5
"""Before an actor that did not answer is asked again; Ray says when it is dead."""
CREATION = "creation task"
"""In Ray's message if an actor could not be made on its node."""
SILENT_S = 60.0
"""An actor that has not answered for so long is lost; it reports every few seconds."""
CONTROL_S = 10.0
"""Ray's control store says within this time which nodes there are, or the cluster is gone."""
START_S = 120.0
"""To start the process, when the actor has a place; another interpreter is looked at first."""
MARGIN_S = 10.0
"""Beyond a process's own grace, until an actor that does not answer is killed."""

T = TypeVar("T")

Choice = dict[str, Any]
"""Options of an actor: resources and scheduling strategy."""


@dataclass(frozen=True, slots=True)
class RayProgram:
    """A program to run in an actor of Ray; the other fields as of `ProcessSpec`."""

    name: str
    order: Callable[[], Order]
    """What an incarnation that starts now is given."""
    log: Path
    """On this machine."""
    choices: Sequence[Choice]
    """Of the actor, and of one more for each further bundle whose GPU it uses."""
    demand: str
    """What Ray is asked for, for people."""
    living: "set[RayChild]" = field(repr=False)
    """Gets each incarnation until it has ended."""
    ready_timeout_s: float = 0.0
    grace_s: float = 5.0
    may_leave: bool = False

    async def start(
        self, on_ready: OnReady, on_notice: OnNotice, on_progress: OnProgress
    ) -> "RayChild":
        """Ask Ray for the actors; does not wait until they have a place."""
        return RayChild(self, on_ready, on_notice, on_progress).begin()


class RayChild:
    """One incarnation of a program."""

    def __init__(
        self,
        program: RayProgram,
        on_ready: OnReady,
        on_notice: OnNotice,
        on_progress: OnProgress,
    ) -> None:
        self._program = program
        self._on_ready = on_ready
        self._on_notice = on_notice
        self._on_progress = on_progress
        first, *others = program.choices
        self._host: Any = ray.remote(ProcessHost).options(max_restarts=0, **first).remote()
        self._holders: list[Any] = [
            ray.remote(GpuHolder).options(max_restarts=0, **each).remote() for each in others
        ]
        self._life: asyncio.Task[int | None] | None = None
        self._pid = 0
        self._is_killed = False
        self._is_stopping = False
        self.node = ""
        """Ray's id of its node; empty until it has a place."""

    def begin(self) -> Self:
        """Begin to follow it."""
        with contextlib.suppress(OSError):  # as `_write`
            self._program.log.touch()
        self._program.living.add(self)
        self._life = asyncio.create_task(self._live(), name=f"follow {self._program.name} on Ray")
        return self

    @property
    def pid(self) -> int:
        """Process id on its node; 0 until it runs there."""
        return self._pid

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it is left."""
        return self._life is None or self._life.done()

    async def wait(self) -> int | None:
        """Wait for its end; returns its exit status, or None if it was lost with its actor.

        Raises:
            ProcessFailed: Ray has lost the node of this program, and all of its actors with it.
        """
        # Several wait; one that is cancelled must not end it for the others.
        assert self._life is not None
        return await asyncio.shield(self._life)

    def kill(self) -> None:
        """SIGKILL the process and all that it started; the actor if there is no process yet."""
        if self.has_ended:
            return
        if self._pid:
            self._host.kill.remote()
        else:
            self.abandon()

    async def stop(self) -> None:
        """Have the process leave; kill its actor if that takes longer than it may."""
        self._is_stopping = True
        if not self._pid:
            self.abandon()
        try:
            async with asyncio.timeout(self._program.grace_s + MARGIN_S):
                if not self._is_killed:
                    await self._answer_of(self._host.stop.remote)
                await self.wait()
        except (TimeoutError, RayError, ProcessFailed):
            pass  # who waits for it is told why
        finally:
            self.abandon()
            if self._life is not None:
                self._life.cancel()

    def abandon(self) -> None:
        """Have Ray end its actors at once, and all that they started with them."""
        self._is_killed = True
        for actor in (self._host, *self._holders):
            ray.kill(actor)

    async def _live(self) -> int | None:
        """All of its life; cancelling it gives it up as lost."""
        try:
            return await self._lived()
        except asyncio.CancelledError:
            return None
        except TimeoutError:
            self._on_notice(f"{COMPLAINT}its actor has not answered for {SILENT_S:g} s")
        except RayActorError as error:
            if CREATION in str(error):
                return self._hopeless(error)
            if not self._is_killed:
                self._on_notice(f"{COMPLAINT}{_reason(error)}")
        except RayError as error:
            return self._hopeless(error)
        finally:
            self.abandon()
            self._program.living.discard(self)
        if not self._is_stopping and await _is_cut_off():
            name = self._program.name
            raise ProcessFailed(name, "the node of this program has left Ray's cluster")
        return None

    async def _lived(self) -> int | None:
        self._on_progress("waiting for a place on Ray")
        places = await self._placed()
        self._on_progress("starting")
        self.node = places[0].node
        if strays := {place.node for place in places[1:]} - {self.node}:
            self._on_notice(
                f"{COMPLAINT}its bundles of the placement group are on several nodes, "
                f"{self.node[:8]} and {', '.join(sorted(each[:8] for each in strays))}"
            )
            return ActorExit.FAILED
        gpus = [gpu for place in places for gpu in place.gpus]
        order = self._program.order()
        start = self._answer_of(lambda: self._host.start.remote(order, gpus), START_S)
        self._pid = await start
        return await self._follow()

    def _hopeless(self, error: RayError) -> ActorExit:
        """Its code fails on the node, or Ray refuses it: the next one would end so, too."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        self._on_notice(f"{COMPLAINT}on Ray: {lines[-1] if lines else type(error).__name__}")
        return ActorExit.SETTINGS

    async def _placed(self) -> list[Place]:
        """Where its actors are, as soon as all have a place."""
        asked = asyncio.gather(
            *(self._answer_of(each.here.remote) for each in (self._host, *self._holders))
        )
        wait_s = PLACED_AFTER_S
        try:
            while not (await asyncio.wait([asked], timeout=wait_s))[0]:
                self._on_notice(f"waits for a place on Ray: it asks for {self._program.demand}")
                wait_s *= 2
            return await asked
        finally:
            asked.cancel()

    async def _follow(self) -> int | None:
        """Pass on what is reported, to the end of the process."""
        n_heard, log_read = 0, 0
        while True:
            asked = (n_heard, log_read)
            report: Report = await self._answer_of(
                lambda asked=asked: self._host.report.remote(*asked), SILENT_S
            )
            self._write(report.log)
            for happening in report.happenings:
                match happening.kind:
                    case "ready":
                        self._on_ready(dict(happening.endpoints))
                    case "told":
                        self._on_notice(happening.sentence)
                    case "progress":
                        self._on_progress(happening.sentence)
            n_heard += len(report.happenings)
            log_read += len(report.log)
            if report.status is not None:
                return report.status

    def _write(self, part: bytes) -> None:
        if part:
            with contextlib.suppress(OSError), self._program.log.open("ab") as log:
                log.write(part)  # if the disk is full, the fleet goes on all the same

    async def _answer_of(
        self, ask: Callable[[], Awaitable[Any]], timeout_s: float | None = None
    ) -> Any:  # noqa: ANN401 - Ray's
        """What the actor answers; asked again while it cannot be reached and is not dead.

        Raises:
            TimeoutError: it has not within `timeout_s` seconds.
            RayError: it is dead.
        """
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await ask()
                except ActorUnavailableError:
                    await asyncio.sleep(UNAVAILABLE_S)


async def _is_cut_off() -> bool:
    """Whether Ray counts the node of this program as dead: its actors are, too, then."""
    own = ray.get_runtime_context().get_node_id()
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[bool] = loop.create_future()

    def ask() -> None:
        is_alive = own in {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        with contextlib.suppress(RuntimeError):  # who asked has given up
            loop.call_soon_threadsafe(lambda: asked.done() or asked.set_result(is_alive))

    # Not of the loop's pool: its end would wait for a control store that is gone.
    threading.Thread(target=ask, name="ask Ray for its nodes", daemon=True).start()
    try:
        async with asyncio.timeout(CONTROL_S):
            return not await asked
    except TimeoutError:
        return True


def _reason(error: RayActorError) -> str:
    """Why an actor is gone, in one line."""
    first, *lines = [line.strip() for line in str(error).splitlines()] or [""]
    told = [line for line in lines if line.startswith("The actor")]
    return f"its actor is gone: {(told or [first])[0].partition(' Some common causes')[0]}"
