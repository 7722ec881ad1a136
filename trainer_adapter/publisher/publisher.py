"""Publishing new weights: a version is written into the store, and the router brings it round."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal, NoReturn, Unpack

import torch

from rolloutbus.bus.strict_calls import Described, strict
from rolloutbus.bus.wire.errors import (
    DeadlineExceeded,
    LocalProtocolError,
    Refused,
    SettingsError,
    cannot_be_pickled,
)
from rolloutbus.bus.wire.messages.endings import Problem, bad_request
from rolloutbus.trainer_adapter.publisher.checkpoint import checkpoint_in
from rolloutbus.trainer_adapter.publisher.collective import CollectiveOffering
from rolloutbus.trainer_adapter.publisher.cuda_ipc import CudaIpcOffering
from rolloutbus.trainer_adapter.publisher.lora import config_of, factors_of, publish_adapter
from rolloutbus.trainer_adapter.publisher.offering import Offering
from rolloutbus.trainer_adapter.publisher.pieces import Pieces
from rolloutbus.trainer_adapter.publisher.publication import (
    AssignedVersion,
    Policy,
    Publication,
    Publishing,
    UpdateOutcome,
    outcome_of,
)
from rolloutbus.trainer_adapter.publisher.sharded import ShardedSource
from rolloutbus.trainer_adapter.publisher.tensor_source import (
    HeldTensors,
    Layout,
    Rename,
    StreamedTensors,
    Tensors,
    are_held,
    as_published,
    planned_tensors,
    published_name,
    require_castable,
    require_tensors,
)
from rolloutbus.trainer_adapter.publisher.transfer import (
    UPDATE_DEADLINE_S,
    Published,
    PublishedLora,
    PublishOptions,
    RestoreOptions,
    UpdateOptions,
    WeightTransferHandle,
    published_of,
)
from rolloutbus.trainer_adapter.publisher.weight_writer import Soundness, WeightCheck, WeightWriter

Publishable = Tensors | HeldTensors | StreamedTensors | ShardedSource | str | os.PathLike[str]
"""A module (its parameters), a state dict, (name, tensor) pairs, what several ranks hold, or the
directory of a checkpoint.

Pairs that come out of an iterator are copied one by one, each before the next one is asked for."""

_CLIENT = "a RolloutClient, of connect(); SyncWeightPublisher takes one of connect_sync()"


def give_up_sources(arguments: Iterable[object]) -> None:
    """Releases the ranks that wait for the tensor source of a refused call."""
    for each in arguments:
        if isinstance(each, HeldTensors | StreamedTensors | ShardedSource):
            each.give_up()


@strict()
class PublisherUpdate:
    """One version under way; see `WeightPublisher.begin`."""

    def __init__(
        self, publication: Publication, rename: Rename | None, layout: Layout | None = None
    ) -> None:
        self._publication = publication
        self._rename = rename
        planned = planned_tensors(layout, rename)
        self._pieces = Pieces(publication, planned) if planned else None
        self._is_putting_all = False
        self.write_s = 0.0
        """Seconds of copying and sealing so far."""
        self.published: Published | None = None
        """Set when the `async with` block has ended well."""

    @property
    def version(self) -> int:
        """0 until `put_all` or `seal`."""
        return self._publication.version

    async def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor into the store; afterwards it may change, or be gone.

        Tensors come in any order, under the trainer's names, each once. No other one is held
        meanwhile. A floating-point tensor is cast to the dtype that `begin(layout=…)` has for it.

        Args:
            name: the trainer's; see `rename` of `WeightPublisher`.
            tensor: on any device.

        Raises:
            Refused: `layout` has no such tensor, has it in another shape, or was not given.
            SettingsError: it is a shard, sparse, or of a dtype that cannot be published.
            RequestError, PeerLost: the store has no room, or was started again.
            DeadlineExceeded: nothing was published.
        """
        if self._pieces is None:
            message = (
                "the store needs all sizes before the first tensor: begin(layout=[(name, dtype, "
                "shape), …]) has them"
            )
            raise Refused(bad_request("layout", message))
        if self.version:
            raise LocalProtocolError("the update is sealed: it takes no other tensor")
        published = published_name(name, self._rename)
        if published is None:
            return
        began = time.monotonic()
        await self._pieces.put(HeldTensors({published: tensor}, as_published))
        self.write_s += time.monotonic() - began

    async def seal(self) -> int:
        """Freeze what was put; returns the version. The end of the block does it otherwise.

        Raises:
            Refused: a tensor of the layout was not put, or is not sound; `.field` names it.
        """
        if not self.version and self._pieces is not None:
            began = time.monotonic()
            await self._pieces.seal()
            self.write_s += time.monotonic() - began
        return self.version

    async def put_all(self, tensors: Publishable, *, layout: Layout | None = None) -> int:
        """Copy all tensors into the store; afterwards they may change. Returns the version.

        One that has failed may be tried again in the same block, such as with a repaired tensor.

        Args:
            tensors: as of `WeightPublisher.publish`.
            layout: as of `WeightPublisher.publish`.

        Raises:
            Refused: a tensor is not sound; `.field` names it.
            RequestError: the store has no room, or the bytes changed while they were copied.
            DeadlineExceeded: nothing was published.
        """
        began = time.monotonic()
        source = source_of(tensors, self._rename, layout)
        try:
            if self.version or self._pieces is not None or self._is_putting_all:
                raise LocalProtocolError(
                    "an update takes its tensors in one put_all, or by `put` with begin(layout=…)"
                )
            self._is_putting_all = True
            try:
                await self._publication.write(source)
            finally:
                self._is_putting_all = False
        finally:
            await asyncio.to_thread(source.give_up)
        self.write_s += time.monotonic() - began
        return self.version


@strict(options=UpdateOptions, refused=give_up_sources)
class WeightPublisher:
    """Publishes versions of one policy. Updates of one policy go one after another."""

    def __init__(
        self,
        client: Annotated[Publishing, Described(_CLIENT)],
        policy: str = "default",
        *,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
        check: WeightCheck = "finite",
        writer: WeightWriter | None = None,
    ) -> None:
        """How every version of the policy is made.

        Args:
            client: of the router that the policy's workers are at.
            policy: whose weights these are.
            dtype: what floating-point tensors are cast to on the way; None keeps theirs.
            rename: the engine's name for the trainer's; None for what is not published. Without
                it names lose what wrappers put into them: `module.` of DDP at their beginning,
                `_orig_mod.`, `_fsdp_wrapped_module.` and `_checkpoint_wrapped_module.` anywhere. A
                `ShardedSource` has its own.
            check: `finite`: a version with infinity or NaN in it, or with a tensor that has become
                all zero since the last one (`allow_zeros=` of `publish` lets it), is refused before
                anybody gets it. `off`: nothing is checked here; workers still check what they get.
            writer: how bytes get into the store.

        Raises:
            SettingsError: tensors cannot be published as `dtype`.
        """
        require_castable(dtype)
        self._rename = rename
        self._offerings: dict[str, Offering] = {
            "cuda_ipc": CudaIpcOffering(),
            "collective": CollectiveOffering(),
        }
        self._policy = Policy(
            client, policy, dtype, writer or WeightWriter(), Soundness(check), self._offerings
        )
        self._check: WeightCheck = check
        self._adapters: dict[str, Soundness] = {}
        self._turn = asyncio.Lock()
        self._is_to_forget = False

    def __reduce__(self) -> NoReturn:
        raise cannot_be_pickled(
            self, "the router's address, and make a client and a publisher there"
        )

    @property
    def policy(self) -> str:
        """Name of the policy that the weights belong to."""
        return self._policy.name

    def offer(self, transport: Literal["cuda_ipc", "collective"], offering: Offering) -> None:
        """Offer versions by this way in a manner of its own, e.g. `CollectiveOffering("nccl")`."""
        self._offerings[transport] = offering

    def forget(self) -> None:
        """No version follows soon: give back the memory that is kept from one to the next.

        A publication that is under way uses it, and gives it back at its end.
        """
        self._is_to_forget = self._turn.locked()
        if not self._is_to_forget:
            self._forget_now()

    def _forget_now(self) -> None:
        self._is_to_forget = False
        self._policy.writer.forget()
        for offering in self._offerings.values():
            offering.forget()

    async def publish(
        self,
        tensors: Publishable,
        *,
        layout: Layout | None = None,
        **options: Unpack[PublishOptions],
    ) -> Published:
        """Bring these weights to every worker of the policy, as one transaction.

        Cancelling it cancels the transaction, if its commit has not been recorded yet; `start`
        has a handle that outlives its waiters.

        Args:
            tensors: on any device. They must not change until the copy is done; `start` and
                `begin` tell when that is. Tied tensors are sent once, under their first name. An
                iterator is read in a thread, one tensor at a time: each is copied before the next
                is asked for, all names are sent, and it is closed at the end in any case. A path is
                a directory with safetensors files, read one tensor at a time.
            layout: (name, dtype, shape) of every tensor that the iterator will give, in its order.
                Without it the iterator's tensors are collected in host memory first.
            **options: how it reaches the workers:
                in_flight: what becomes of running requests: `finish_old`, `keep` (keep the KV
                cache), `retract` (keep tokens, recompute the KV cache) or `abort`.
                require: how many workers must have it staged: `all`, `quorum`, `any` or
                `at-least:N`.
                transport: how the bytes reach the workers: `auto` (each by its locality), `shm`,
                `tcp`, `delta`, `disk`, `cuda_ipc` or `collective`.
                mode: `staged`: held beside the old weights first; `overwrite`: written over them.
                floor: workers that go on serving while others swap; 0: all swap at once.
                tag: the trainer's own label of the version, such as its step, for requests with
                `versions="min-tag:T"`. Those of a policy only grow; a version without one counts as
                having that of the version before it.
                allow_zeros: a tensor may be all zero where the last version, or the active one of
                a worker, was not: training begins again, or a layer was reset.
                version: the number that it gets, above all before, where others name it by that;
                0: the next one. What was begun uses it up: a second try needs another number.
                deadline_s: for everything, seconds from now.

        Raises:
            Refused: an option or a tensor is wrong; `.field` names it. Nothing was published.
            OutcomeUnknown: it may be committed, or be some time; ask `outcome(error.version)`.
            RequestError: refused or failed: every worker keeps the old weights; see `.code`.
            OtherFleet: another fleet came to the address meanwhile: publish again, to that one.
            PeerLost: no store, or a rank of a ShardedSource, is there any more; or, with outcome
                `not_started`, the store lost what was being written: publish again.
            DeadlineExceeded: no router answered, or the update before has not ended; outcome
                `not_started`: nothing was published.
        Spec: docs/protocol.md, "Weights".
        """
        return await _attended(self.start(tensors, layout=layout, **options))

    def start(
        self,
        tensors: Publishable,
        *,
        layout: Layout | None = None,
        **options: Unpack[PublishOptions],
    ) -> WeightTransferHandle:
        """The same in the background: `await handle.copied()`, then train on; `await handle`.

        Arguments as of `publish`.

        Raises:
            Refused, SettingsError: an option or a tensor is wrong.
        """
        source = source_of(tensors, self._rename, layout)
        try:
            publication = Publication(self._policy, UpdateOptions(**options))
        except BaseException:  # such as an interrupt: other ranks wait for this one's word
            source.give_up()
            raise

        async def run() -> Published:
            try:
                return await self._run(publication, partial(publication.write, source))
            finally:
                await asyncio.to_thread(source.give_up)

        return WeightTransferHandle(publication.log, run, publication.stop)

    async def publish_lora(
        self,
        name: str,
        tensors: Tensors,
        *,
        alpha: float,
        use_rslora: bool = False,
        allow_zeros: bool = False,
        deadline_s: float = UPDATE_DEADLINE_S,
    ) -> PublishedLora:
        """Bring a low-rank adapter to every worker of the policy; the weights stay.

        Requests with `lora=NAME` get it from now on; those that run end on what they began with.
        A worker that joins or starts again later is brought them, until they are unloaded.

        Args:
            name: 1 to 40 of `A-Z a-z 0-9 _ -`.
            tensors: factors `MODULE.lora_A.weight` [rank, in] and `MODULE.lora_B.weight`
                [out, rank], as a PEFT model or its state dict has them; others are left out.
            alpha: the product of a pair is scaled by alpha / rank.
            use_rslora: the product is scaled by alpha / sqrt(rank) instead.
            allow_zeros: a factor may be all zero that was not in the adapter's last version.
            deadline_s: for everything, seconds from now.

        Raises:
            SettingsError, Refused: this is no adapter.
            RequestError: no worker has taken it; or the store has no room.
            DeadlineExceeded: some may have it.
        """
        soundness = self._adapters.setdefault(name, Soundness(self._check))
        options = UpdateOptions(allow_zeros=allow_zeros, deadline_s=deadline_s)
        deadline_at = time.monotonic() + deadline_s
        async with self._own_turn(deadline_s):
            options = replace(options, deadline_s=max(0.01, deadline_at - time.monotonic()))
            policy = replace(self._policy, soundness=soundness)
            factors = factors_of(tensors)
            config = config_of(factors, alpha, use_rslora=use_rslora)
            return await publish_adapter(policy, name, factors, config, options)

    async def restore(self, version: int, **options: Unpack[RestoreOptions]) -> Published:
        """Go back: publish a new version with the content of an old one that the store keeps.

        One that was committed once is trusted: tensors of zeros in it are no error. The other
        arguments as of `publish`.

        Raises:
            As `publish`. Code `version_unavailable`: the store does not keep it any more.
        """
        publication = Publication(self._policy, UpdateOptions(**options))
        run = partial(self._run, publication, partial(publication.restore, version))
        return await _attended(WeightTransferHandle(publication.log, run, publication.stop))

    async def outcome(self, version: int = 0, *, deadline_s: float = 30.0) -> UpdateOutcome:
        """Returns the final outcome of a version whose publication ended with `OutcomeUnknown`.

        One that is not committed by now never will be. Waits while it is being published, and for a
        store that is not there.

        Args:
            version: `.version` of the error; 0: the latest one of this publisher.
            deadline_s: seconds from now.

        Raises:
            Refused: `version_unavailable`: there was no such version, or it is too old to tell.
            OtherFleet: it is a version of the fleet that was at the address before.
            RequestError, PeerLost: the answer is not known yet: ask again when the store is back.
            DeadlineExceeded: the same.
        """
        try:
            async with asyncio.timeout(deadline_s), self._own_turn():
                if not version and not self._policy.latest:
                    message = "this publisher has not published anything yet"
                    raise Refused(Problem("version_unavailable", message, "not_started", "version"))
                asked = AssignedVersion(version, "") if version else self._policy.latest[-1]
                return await outcome_of(self._policy, asked, deadline_s)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"no answer within {deadline_s:g} s: ask again when the store is back"
            ) from error

    @asynccontextmanager
    async def begin(
        self, *, layout: Layout | None = None, **options: Unpack[PublishOptions]
    ) -> AsyncGenerator[PublisherUpdate]:
        """An update in steps, published at the end of the block.

        Inside stands `await update.put_all(tensors)`, or, with a layout, `await update.put(name,
        tensor)` for each tensor. Leaving the block by an error publishes nothing, nor does a block
        without a layout in which nothing was put. A `put` that still runs then is stopped.

        Args:
            layout: (name, dtype, shape) of every tensor that will be put, in any order: the
                trainer's names, and the dtype in which each is published, but for
                floating-point ones of a publisher that has a `dtype`.
            **options: as of `publish`.
        """
        publication = Publication(self._policy, UpdateOptions(**options))
        update = PublisherUpdate(publication, self._rename, layout)
        async with self._own_turn(publication.left_s), publication:
            yield update
            if await update.seal():
                began = time.monotonic()
                result = await publication.publish()
                took_s = time.monotonic() - began
                update.published = published_of(result, update.write_s, took_s)

    @asynccontextmanager
    async def _own_turn(self, deadline_s: float | None = None) -> AsyncGenerator[None]:
        """Updates of one policy go one after another.

        Raises:
            DeadlineExceeded: the one before has not ended in time; nothing was published.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await self._turn.acquire()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the update before has not ended within {deadline_s:g} s: nothing was published; "
                "wait for it, or give a later deadline_s",
                outcome="not_started",
            ) from error
        try:
            yield
        finally:
            if self._is_to_forget:
                self._forget_now()
            self._turn.release()

    async def _run(
        self, publication: Publication, write: Callable[[], Awaitable[None]]
    ) -> Published:
        async with self._own_turn(publication.left_s), publication:
            began = time.monotonic()
            await write()
            wrote = time.monotonic()
            result = await publication.publish()
            return published_of(result, wrote - began, time.monotonic() - wrote)


async def _attended(handle: WeightTransferHandle) -> Published:
    try:
        return await handle
    except asyncio.CancelledError:
        handle.stop()
        raise


Source = HeldTensors | StreamedTensors | ShardedSource
"""What tensors are read from; whoever made it has it read, or gives it up."""


def source_of(
    tensors: Publishable, rename: Rename | None = None, layout: Layout | None = None
) -> Source:
    """What is read of them; a source stays what it is.

    Raises:
        SettingsError: they are no tensors; or a source has its own layout.
        Refused: the directory holds no checkpoint.
    """
    if isinstance(tensors, str | os.PathLike):
        if layout is not None:
            raise SettingsError("layout: the files of a directory have their own")
        checkpoint = checkpoint_in(tensors)
        try:
            return StreamedTensors(
                checkpoint.tensors(), rename, checkpoint.layout, at_end=checkpoint.close
            )
        except BaseException:  # such as one of `rename`
            checkpoint.close()
            raise
    if isinstance(tensors, HeldTensors | StreamedTensors | ShardedSource):
        if layout is not None:
            raise SettingsError("layout is for an iterator of (name, tensor) pairs")
        if isinstance(tensors, ShardedSource):
            tensors.note_work()
        return tensors
    require_tensors(tensors)
    if layout is not None or not are_held(tensors):
        return StreamedTensors(tensors, rename, layout)
    return HeldTensors(tensors, rename)
