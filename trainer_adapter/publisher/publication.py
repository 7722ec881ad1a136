"""One version on its way: reserved, written and sealed in the store, then the router's update."""

import asyncio
import contextlib
import time
import traceback
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol, Self, TypeVar, cast, runtime_checkable

import msgspec
import torch

from rolloutbus.bus.actor.ref import ROUTER, STORE
from rolloutbus.bus.security.zmq_curve import Dialer
from rolloutbus.bus.transport.bulk import BulkLink
from rolloutbus.bus.transport.endpoints import is_out_of_reach, store_out_of_reach
from rolloutbus.bus.weights.manifest import lay_out, total_bytes
from rolloutbus.bus.wire.errors import (
    BusError,
    DeadlineExceeded,
    EngineFailed,
    LocalProtocolError,
    OtherFleet,
    OutcomeUnknown,
    PeerLost,
    Refused,
    RemoteProtocolError,
    RequestCancelled,
    RequestError,
)
from rolloutbus.bus.wire.limits import MAX_SENTENCE_CHARS
from rolloutbus.bus.wire.messages.control import FleetStatus, Status
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.weights import (
    Offer,
    PublishVersion,
    Reserved,
    ReserveVersion,
    RestoreVersion,
    SealVersion,
    Settled,
    SettleVersion,
    Tensor,
    UpdateProgress,
    VerifyTensors,
    VersionRestored,
)
from rolloutbus.bus.wire.messages.weights import VersionPublished as PublishedByRouter
from rolloutbus.trainer_adapter.client.commands import FleetRef
from rolloutbus.trainer_adapter.client.connection import Connection
from rolloutbus.trainer_adapter.client.core.endings import UPDATE_UNKNOWN
from rolloutbus.trainer_adapter.client.core.requests import Ask
from rolloutbus.trainer_adapter.client.core.results import FleetResult
from rolloutbus.trainer_adapter.publisher.early_verification import EarlyVerification
from rolloutbus.trainer_adapter.publisher.offering import Offering, gpus_of, is_shared
from rolloutbus.trainer_adapter.publisher.tensor_source import (
    DTYPE_NAMES,
    SourceTensor,
    StreamedTensors,
    TensorSource,
    published_dtype,
)
from rolloutbus.trainer_adapter.publisher.transfer import TransferLog, UpdateOptions
from rolloutbus.trainer_adapter.publisher.weight_writer import (
    CopyWatch,
    Room,
    Soundness,
    WeightWriter,
    Written,
    ended,
    in_thread,
    tensors_in,
)

SETTLE_S = 2.0
"""For the store to take back a version that was refused, cancelled or failed."""
LATE_ROOM_S = 60.0
"""How long after the deadline the room that a busy store finds is still given back."""
STORE_TRIES = 3
"""Commands to the store may be repeated; so often when it is lost under way."""

POLL_S = 0.05
"""Between two looks for what is not reported unasked: the store's place, an update's end."""

ResultT = TypeVar("ResultT", bound=msgspec.Struct)
TakenT = TypeVar("TakenT", Reserved, VersionRestored)


UpdateOutcome = Literal["committed", "not_committed"]
"""What became of a version, for good."""


@runtime_checkable
class Publishing(Protocol):
    """What a publisher needs of a client."""

    connection: Connection

    @property
    def bulk(self) -> str:
        """Endpoint of the weight store's bulk socket; empty while there is no store."""
        ...

    @property
    def dialer(self) -> Dialer | None:
        """The keys it connects with, if any."""
        ...

    def ref(self, address: str) -> FleetRef:
        """The router (empty) or the `store`."""
        ...


class AssignedVersion(NamedTuple):
    """A version number that a store gave."""

    version: int
    fleet: str
    """The fleet of that store; empty if its name is not known yet."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What all publications of one publisher share."""

    client: Publishing
    name: str
    dtype: torch.dtype | None
    """What floating-point tensors are cast to; None: not at all."""
    writer: WeightWriter
    soundness: Soundness
    offerings: Mapping[str, Offering] = field(default_factory=dict[str, Offering])
    """Transport -> who offers it."""
    latest: deque[AssignedVersion] = field(default_factory=lambda: deque[AssignedVersion](maxlen=1))
    """The version that a store assigned last."""
    settling: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    """Of versions whose numbers came after the end of their publications."""


class Publication:
    """One version; every step once, in order. An async context manager."""

    def __init__(self, policy: Policy, options: UpdateOptions) -> None:
        """The deadline runs from now on.

        Raises:
            WrongEventLoop: the client belongs to another loop.
        """
        policy.client.connection.require_home()
        self._policy = policy
        self._options = options
        self._deadline_at = time.monotonic() + options.deadline_s
        self.log = TransferLog()
        self._rid = ""
        self._update = ""
        """The router's name for its try."""
        self._offerings: list[Offering] = []
        self._offers: list[Offer] = []
        self._fleet = ""
        """Whose store gave it its number, which is another version's in any other fleet."""
        self._taking: asyncio.Future[Reserved | VersionRestored] | None = None
        """The store's answer that gives it its number."""
        self._early: EarlyVerification | None = None
        self._is_settled = False
        """It is committed, or the store was asked to decide against it."""
        self._is_over = False
        """Its block was left: what still runs of it may neither reserve nor write."""
        self._steps: dict[asyncio.Future[None], asyncio.Timeout] = {}
        """The end of each step of the writing that runs, and what stops it."""
        self._gpu: torch.device | None = None
        """That tensors came from."""
        self._on_commit: Callable[[], None] = lambda: None
        """Makes it what the next version is compared with; nothing before it is sealed."""
        self.version = 0
        """0 until it is written or restored."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._is_over = True
        self.log.copied.set()
        _let_go(error)
        try:
            await self._stop_steps()
        finally:
            await self._give_back()

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least a hundredth."""
        return max(0.01, self._deadline_at - time.monotonic())

    async def write(self, source: TensorSource) -> None:
        """Copy all tensors into the store and seal them there; again, if it has failed before.

        Raises:
            RequestError: the store has no room, or the tensors are not sound.
            PeerLost: the store was started again meanwhile.
            DeadlineExceeded: nothing was published.
        """
        async with self.writing():
            await self._write(source)

    @asynccontextmanager
    async def writing(self) -> AsyncGenerator[None]:
        """A step of the writing, within the deadline, with its errors told as a caller knows them.

        Raises:
            As `write`. LocalProtocolError: the block of the update has ended.
        """
        self._require_open()
        end = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self.left_s) as limit:
                self._steps[end] = limit
                yield
        except TimeoutError as error:
            self._require_open()
            latest = self.log.latest
            raise DeadlineExceeded(
                f"the deadline passed while the weights were written: {latest.copied_bytes} of "
                f"{latest.size_bytes} bytes were copied, phase {latest.phase}; nothing was "
                "published: give a later deadline_s",
                outcome="not_started",
            ) from error
        except RequestError as error:
            if error.code != "version_unavailable":
                raise
            raise PeerLost(
                f"the store lost version {self.log.latest.version} while it was written, as it was "
                "started again or had heard nothing of it for minutes; nothing was published: "
                "publish again",
                outcome="not_started",
            ) from error
        finally:
            self._steps.pop(end, None)
            end.set_result(None)

    async def restore(self, version: int) -> None:
        """Take the content of a version that the store still keeps instead of tensors.

        Raises:
            RequestError: it does not.
        """
        body = RestoreVersion(policy=self._policy.name, version=version)
        self.version = (await self._take(VersionRestored, body)).version
        self._on_commit = self._policy.soundness.restored
        self.log.enter("sealing", version=self.version)
        self.log.copied.set()

    async def publish(self) -> PublishedByRouter:
        """Let the router bring the sealed version to the workers.

        Raises:
            As `WeightPublisher.publish`.
        """
        if time.monotonic() >= self._deadline_at:  # a block of `begin` may end at any time
            raise DeadlineExceeded(
                f"the deadline of {self._options.deadline_s:g} s passed before the version was "
                "published; nothing was published: give a later deadline_s",
                outcome="not_started",
            )
        self.require_own_fleet()
        router = self._policy.client.connection.upstream.router
        # The router passes on where a group meets, and only while it is this router.
        bare = [
            msgspec.structs.replace(
                each, buckets=[], router=router if each.transport == "collective" else ""
            )
            for each in self._offers
        ]
        options = self._options
        command = PublishVersion(
            policy=self._policy.name,
            version=self.version,
            in_flight=options.in_flight,
            require=options.require,
            transport=options.transport,
            mode=options.mode,
            floor=options.floor,
            offers=bare,
            tag=options.tag,
        )
        serving = [asyncio.create_task(each.serve()) for each in self._offerings]
        try:
            result = await self._ask_router(command)
        except BusError as error:
            has_moved = self._policy.client.connection.upstream.router != router
            is_known = error.outcome != "unknown" or isinstance(error, RequestCancelled)
            judged = await self._judged(error, is_sure=is_known and not has_moved)
            if judged is error:
                raise
            raise judged from error
        finally:
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
        self.keep()
        if self._gpu is not None:
            self._policy.writer.lock_pages(self._gpu)
        self.log.enter("committed")
        return result

    def keep(self) -> None:
        """It is committed, or in use: its bytes stay."""
        self._is_settled = True
        self._on_commit()

    async def _take(
        self, expected: type[TakenT], body: msgspec.Struct, late_s: float = 0.0
    ) -> TakenT:
        """Have the store make a version of it; a caller cancelled meanwhile gives it back.

        Its answer is waited for until `late_s` after the deadline; the caller stops before.
        """

        async def numbered() -> TakenT:
            taken = await self._ask_store(expected, body, late_s)
            self._fleet = self._policy.client.connection.fleet
            if not self._is_over:  # the next publication may have a number by then
                self._policy.latest.append(AssignedVersion(taken.version, self._fleet))
            return taken

        taking = asyncio.ensure_future(numbered())
        self._taking = cast("asyncio.Future[Reserved | VersionRestored]", taking)
        return await asyncio.shield(taking)

    async def _judged(self, error: BusError, *, is_sure: bool) -> BusError:
        """The error to raise for a publication that the router has not called committed."""
        is_committed = await self._settle()
        if isinstance(error, OtherFleet):
            return error  # this fleet's store knows nothing of it
        if is_committed:
            message = f"version {self.version} is committed all the same; the update ended: {error}"
        elif is_committed is None and not is_sure:
            message = f"version {self.version} may be committed or not: {error}"
        elif is_committed is None or is_sure or isinstance(error, RequestCancelled):
            return error
        else:
            message = f"version {self.version} is not committed and never will be: {error}"
            problem = Problem("update_failed", message[:MAX_SENTENCE_CHARS], "failed")
            return EngineFailed(problem, rid=self._rid)
        problem = Problem(UPDATE_UNKNOWN, message[:MAX_SENTENCE_CHARS], "unknown")
        unknown = OutcomeUnknown(problem, rid=self._rid)
        unknown.version = self.version
        return unknown

    async def _give_back(self) -> None:
        """Ends what a version keeps here and in the store."""
        if self._early is not None:
            self._early.close()
        async with AsyncExitStack() as closing:
            closing.push_async_callback(self._settle)
            for offering in self._offerings:
                closing.push_async_callback(offering.close)

    async def _stop_steps(self) -> None:
        """Stops what is still written, and waits for its end: the memory is another's after that.

        A task that outlives its block may write, as those of a `gather` that has failed do.
        """
        for limit in self._steps.values():
            if not limit.expired():
                limit.reschedule(0.0)
        await ended(asyncio.gather(*self._steps))

    def _require_open(self) -> None:
        if self._is_over:
            raise LocalProtocolError("the block of this update has ended: it takes no other tensor")

    async def _begin_again(self) -> None:
        """Gives back what a write took that has failed; the next one gets another number."""
        await self._give_back()
        self._early = self._taking = None
        self._offerings, self._offers = [], []
        self._is_settled = False

    async def _settle(self) -> bool | None:
        """Gives the bytes back unless committed; returns whether it is, or None if unknown."""
        taking = self._taking
        if self._is_settled or taking is None:
            return None
        self._is_settled = True
        try:
            async with asyncio.timeout(SETTLE_S):
                is_committed = await self._decided((await asyncio.shield(taking)).version)
                if is_committed:
                    self._on_commit()
                return is_committed
        except BusError:
            return None  # the store gives it up by itself, once the router reports that we are gone
        except TimeoutError:
            taking.add_done_callback(self._settle_late)  # a store may take seconds to find room
            return None
        except asyncio.CancelledError:
            taking.add_done_callback(self._settle_late)  # whoever waits may be cancelled twice
            raise
        finally:
            self._policy.writer.tidy()

    async def _decided(self, version: int) -> bool:
        """Has the store decide whether the version is committed; its bytes are given back if not.

        Raises:
            BusError: it has not.
        """
        self.require_own_fleet()  # or another publisher's version of that number is settled
        body = SettleVersion(self._policy.name, version)
        store = self._policy.client.ref(STORE)
        result = await store.ask_for(FleetResult, body, deadline_s=SETTLE_S)
        return result.only(Settled).is_committed

    def _settle_late(self, taking: asyncio.Future[Reserved | VersionRestored]) -> None:
        """Gives back what the store has reserved for a publication that has ended.

        Otherwise the memory would be taken until the store gives it up by itself, minutes later.
        """
        if taking.cancelled() or taking.exception() is not None:
            return
        settling = asyncio.create_task(self._given_back(taking.result().version))
        self._policy.settling.add(settling)
        settling.add_done_callback(self._policy.settling.discard)

    async def _given_back(self, version: int) -> None:
        with contextlib.suppress(BusError):  # as in `_settle`
            await self._decided(version)

    def require_own_fleet(self) -> None:
        """Checks that the present fleet is the one that numbered this version.

        Raises:
            OtherFleet: another fleet answers, so that nothing can become of this version.
        """
        self._policy.client.connection.require_fleet(self._fleet)

    async def bulk(self) -> str:
        """Endpoint of the store; waits while the client has not heard of it.

        Raises:
            OtherFleet: it is another one than that which gave the version its number.
            PeerLost: it does not before the deadline.
            Refused: it is one that cannot be reached from this host.
        """
        client = self._policy.client
        while not client.bulk:
            if time.monotonic() >= self._deadline_at:
                raise PeerLost("the router tells of no weight store", outcome="not_started")
            await asyncio.sleep(POLL_S)  # news of members come unasked
        self.require_own_fleet()
        if is_out_of_reach(client.bulk, client.connection.settings.router):
            raise Refused(Problem("no_store", store_out_of_reach(client.bulk), "not_started"))
        return client.bulk

    def stop(self) -> bool:
        """Have the router end it, if the router has it. False: it has not."""
        if self._rid:
            self._policy.client.connection.abort([self._rid])
        return bool(self._rid)

    async def _write(self, source: TensorSource) -> None:
        policy = self._policy
        if self._taking is not None:
            await self._begin_again()
        if isinstance(source, StreamedTensors) and not source.has_layout:
            self.log.enter("copying")
            watch = CopyWatch()
            work = partial(source.held_copies, policy.dtype, watch.require_wanted)
            source = await in_thread(work, watch.stop)
        layout = self.laid_out(source.tensors)
        reserved = await self.reserve(layout)
        watch = CopyWatch(self.log.copied_so_far)
        offering = asyncio.ensure_future(self._offer_held(layout, source))
        try:
            room = self.room(reserved, layout)
            early = self.early(reserved, layout)
            on_written = early.written if room.is_in_store else None
            written = await policy.writer.copy(room, layout, source, watch, on_written)
            await offering
        except BaseException:
            offering.cancel()  # it may wait for others, longer than the deadline
            raise
        finally:
            await ended(offering)  # it reads tensors that may change after this
        try:
            await self.seal(reserved, layout, written)
        finally:
            del written  # an error's traceback would keep its memory

    def laid_out(self, tensors: Iterable[SourceTensor]) -> list[Tensor]:
        """Where each tensor lies in the version, as it is published."""
        return lay_out(
            (each.name, DTYPE_NAMES[published_dtype(each.dtype, self._policy.dtype)], each.shape)
            for each in tensors
        )

    async def reserve(self, layout: list[Tensor]) -> Reserved:
        """Have the store give a number, and room for these tensors.

        Raises:
            As `writing`.
        """
        self._require_open()
        self.log.enter("copying", size_bytes=total_bytes(layout))
        body = ReserveVersion(self._policy.name, layout, self._options.version)
        # Who hears nothing knows no number, and cannot give the room back.
        reserved = await self._take(Reserved, body, LATE_ROOM_S)
        self.log.enter("copying", version=reserved.version)
        return reserved

    def early(self, reserved: Reserved, layout: list[Tensor]) -> EarlyVerification:
        """What tells the store of what is written, until this publication ends.

        Raises:
            LocalProtocolError: it has ended.
        """
        self._require_open()
        store, policy = self._policy.client.ref(STORE), self._policy.name

        async def tell(numbers: list[int], digests: list[int]) -> None:
            self.require_own_fleet()
            body = VerifyTensors(policy, reserved.version, numbers, digests)
            await store.ask(body, deadline_s=self.left_s)

        self._early = EarlyVerification(layout, tell)
        return self._early

    def room(self, reserved: Reserved, layout: Sequence[Tensor]) -> Room:
        """Where the bytes are to be put."""
        return self._policy.writer.room(reserved, total_bytes(layout))

    async def seal(
        self,
        reserved: Reserved,
        layout: list[Tensor],
        written: Written,
    ) -> None:
        """Judge what was written, and freeze it in the store.

        Args:
            reserved: the store's answer.
            layout: of the version.
            written: its bytes.

        Raises:
            Refused: a tensor is not sound; `.field` names it.
        """
        policy, allow_zeros = self._policy, self._options.allow_zeros
        policy.soundness.require(layout, written.judgements, allow_zeros=allow_zeros)
        if not self._offerings:
            await self._prepare_offers(layout, tensors_in(written.content, layout))
        self.log.enter("sealing")
        self.log.copied.set()
        if not written.is_in_store:
            bulk = BulkLink(await self.bulk(), policy.client.dialer)
            await policy.writer.push(written.content, reserved, policy.name, bulk)
        digests = [judged.digest for judged in written.judgements]
        seal = SealVersion(policy.name, reserved.version, digests, self._offers, allow_zeros)
        await self._ask_store(Done, seal)
        self._on_commit = partial(policy.soundness.committed, layout, written.judgements)
        self._gpu = written.gpu
        self.version = reserved.version

    async def _offer_held(self, layout: Sequence[Tensor], source: TensorSource) -> None:
        """Prepares the offerings beside the copying, if all tensors exist side by side.

        What the trainer had asked of its GPU by then is waited for first, as the copying does: the
        event loop's thread has streams of its own, and would copy what was there before.
        """
        if source.held and self._wanted(source.held):
            await in_thread(source.wait_written)
            await self._prepare_offers(layout, source.held)

    async def _prepare_offers(
        self, layout: Sequence[Tensor], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Prepares the offerings; `tensors` are the trainer's own, or views of the host's copy."""
        for offering in self._wanted(tensors):
            self._offerings.append(offering)
            self._offers += await offering.prepare(layout, tensors)

    def _wanted(self, held: Sequence[torch.Tensor]) -> list[Offering]:
        """Returns the offering to use; `auto` is `cuda_ipc` if a worker shares the GPU."""
        policy, wanted = self._policy, self._options.transport
        if wanted == "auto":
            members = policy.client.connection.members
            wanted = "cuda_ipc" if is_shared(gpus_of(held), members, policy.name) else ""
        return [policy.offerings[wanted]] if wanted in policy.offerings else []

    async def _ask_router(self, command: PublishVersion) -> PublishedByRouter:
        courier = self._policy.client.connection
        ask = Ask("publish_version", command)
        self._rid, future = courier.submit(ask, self.left_s, self._routed)
        try:
            result = await future
        finally:
            courier.forget(self._rid)
        if not isinstance(result, PublishedByRouter):
            raise RemoteProtocolError(f"publish_version ended with {type(result).__name__}")
        return result

    def _routed(self, progress: UpdateProgress) -> None:
        """What the router reports; when it begins again, or another one does, groups are over."""
        if self._update not in ("", progress.update):
            for each in self._offerings:
                each.call_off()
        self._update = progress.update
        self.log.routed(progress)

    async def _ask_store(
        self, expected: type[ResultT], body: msgspec.Struct, late_s: float = 0.0
    ) -> ResultT:
        store = self._policy.client.ref(STORE)
        n_tries = 1
        while True:
            self.require_own_fleet()
            try:
                patience_s = self.left_s + late_s
                result = await store.ask_for(FleetResult, body, deadline_s=patience_s)
                return result.only(expected)
            except OtherFleet:
                raise
            except PeerLost:
                # After the deadline nobody is left who wants what another try would bring.
                if n_tries == STORE_TRIES or time.monotonic() >= self._deadline_at:
                    raise
                n_tries += 1


def _let_go(error: BaseException | None) -> None:
    """Forget what our own frames of an error's traceback hold: the memory of a whole version.

    Whoever keeps the error, or has Python keep it until it looks for cycles, would keep that, too.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # `raise e from e` makes a cycle
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__package__") == __package__:
                with contextlib.suppress(RuntimeError):  # it is running
                    frame.clear()
        error = error.__cause__ or error.__context__


async def outcome_of(policy: Policy, asked: AssignedVersion, deadline_s: float) -> UpdateOutcome:
    """What became of a version, as soon as its publication has ended; see `WeightPublisher`."""
    client = policy.client
    key = (policy.name, asked.version)
    while True:
        fleet = await client.ref(ROUTER).ask_for(FleetStatus, Status(), deadline_s=deadline_s)
        if key not in [(each.policy, each.version) for each in fleet.updates]:
            break
        await asyncio.sleep(POLL_S)
    client.connection.require_known_fleet()  # or its version of that number would be settled
    client.connection.require_fleet(asked.fleet)
    store = client.ref(STORE)
    body = SettleVersion(policy.name, asked.version)
    result = await store.ask_for(FleetResult, body, deadline_s=deadline_s)
    return "committed" if result.only(Settled).is_committed else "not_committed"
