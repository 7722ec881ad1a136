"""Receives the trainer's broadcast: the rendezvous, and the buffers that it is received into."""

import ipaddress
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from rolloutbus.bus.weights.cuda_memory import CudaError
from rolloutbus.bus.weights.manifest import Bytes
from rolloutbus.bus.weights.rank_group import (
    END,
    GO,
    GROUP_NAME,
    TIMEOUT,
    WORLD,
    BadReport,
    BrokenGroup,
    KeptGroup,
    RankGroup,
    RankReport,
    Seat,
    done_key,
    first_line,
    joined_key,
    read_timeout_s,
    seat_key,
    write_report,
)
from rolloutbus.bus.weights.side_by_side import first_mismatch
from rolloutbus.bus.wire.errors import EngineFailed
from rolloutbus.bus.wire.messages.weights import Bucket, Manifest, Offer
from rolloutbus.engine_worker.weights.checks import wrong_bytes
from rolloutbus.engine_worker.weights.staged import CannotFetch
from rolloutbus.engine_worker.weights.torch_tensors import first_wrong
from rolloutbus.engine_worker.weights.transports.buckets import wrong_bucket
from rolloutbus.engine_worker.weights.transports.gpu_memory import SpareGpuMemory

_CONNECT_S = 5.0
_MARGIN_S = 10.0
"""The trainer's timeout ends first, so that all ranks get the same reason."""


class WorkerRendezvous:
    """A connection to the rendezvous; it is useless after any error."""

    def __init__(self, at: str, backend: str, seat: tuple[int, int], kept: KeptGroup) -> None:
        """Connect to `at`, `host:port`, as `seat`: (rank, world).

        `kept` has the group of the last version, if any, and gets that of this one.

        Raises:
            CannotFetch: the trainer is not there.
        """
        host, port = _address(at)
        try:
            # First a plain connection, which fails at once and tells our own address; a TCPStore
            # tries until its timeout.
            with socket.create_connection((host, port), _CONNECT_S) as probe:
                self._own_address = str(probe.getsockname()[0])
            wait = timedelta(seconds=_CONNECT_S)
            self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                host, port, is_master=False, timeout=wait, wait_for_workers=False
            )
            self._timeout_s = read_timeout_s(self._store.get(TIMEOUT))
        except (OSError, RuntimeError, BadReport) as error:
            raise CannotFetch(
                f"the rendezvous at {at} is not there: {first_line(error)}"
            ) from error
        self._patience = timedelta(seconds=self._timeout_s + _MARGIN_S)
        self._backend, (self._rank, self._world) = backend, seat
        self._kept = kept
        self._group: RankGroup | None = None

    def join(self, *, problem: str = "", gpu: str = "") -> None:
        """Report that this rank is there, on this GPU if it is, or why it will not be.

        Raises:
            CannotFetch: the broadcast is over, the rank is taken, or the trainer is gone.
        """
        self._group = self._kept.take()
        if self._group is not None and not self._group.has_seat(
            self._backend, self._rank, self._world
        ):
            self.close()
        group = self._group.name if self._group is not None else ""
        report = RankReport(problem=problem, gpu=gpu, group=group)
        try:
            why_not = self._take_seat(report)
        except RuntimeError as error:
            why_not = f"the rendezvous has gone: {first_line(error)}"
        if why_not:
            self.close()
            raise CannotFetch(why_not)

    def receive(self, pieces: Sequence[torch.Tensor]) -> None:
        """Wait for the others, then for the bytes.

        Raises:
            CannotFetch: a rank did not come, has died or is late.
        """
        try:
            self._store.wait([GO], self._patience)
            why_not = self._store.get(GO).decode(errors="replace")
            if why_not:
                # The trainer waits for this, so that no rank's links end before it knows why.
                self._store.set(done_key(self._rank), write_report(RankReport(problem=why_not)))
                self.close()
                raise CannotFetch(why_not)
            self._meet(self._group_name()).broadcast(pieces)
        except (RuntimeError, BrokenGroup) as error:
            self.close()
            raise CannotFetch(f"the broadcast broke: {first_line(error)}") from error

    def report(self, problem: str) -> None:
        """Report how it ended, and stay until all ranks have ended: they receive through it."""
        try:
            self._store.set(done_key(self._rank), write_report(RankReport(problem=problem)))
            self._store.wait([END], self._patience)
            if not problem:
                self._keep()
        except RuntimeError:
            return  # the trainer is gone; what we have, we have
        finally:
            self.close()

    def close(self) -> None:
        """Cut the links to the other ranks, unless they are kept."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _take_seat(self, report: RankReport) -> str:
        """Returns why it cannot be taken, or nothing. Raises RuntimeError: the trainer is gone."""
        if self._store.check([END]):
            return "the broadcast is over"
        if self._store.add(seat_key(self._rank), 1) > 1:
            return f"rank {self._rank} was there already"
        self._store.set(WORLD, str(self._world))
        self._store.set(joined_key(self._rank), write_report(report))
        return ""

    def _group_name(self) -> str:
        """The trainer's name for the group of this version; empty: it will not keep it."""
        is_named = self._store.check([GROUP_NAME])
        return self._store.get(GROUP_NAME).decode(errors="replace") if is_named else ""

    def _meet(self, name: str) -> RankGroup:
        """The group of that name: the one that was kept, or a new one with all ranks."""
        if self._group is None or self._group.name != name:
            self.close()
            seat = Seat(self._backend, self._rank, self._world, self._own_address, self._timeout_s)
            self._store.set_timeout(timedelta(seconds=self._timeout_s))
            self._group = RankGroup(dist, self._store, seat, name)
        return self._group

    def _keep(self) -> None:
        """Leave the group to the next version; if the trainer does not, it will say so then."""
        group, self._group = self._group, None
        if group is not None and group.name:
            self._kept.keep(group)
        elif group is not None:
            group.close()


def _address(at: str) -> tuple[str, int]:
    host, _, port = at.rpartition(":")
    try:
        ipaddress.ip_address(host)
        return host, int(port)
    except ValueError as error:
        raise CannotFetch(f"{at[:80]!r} is not an address") from error


class HostBuffer:
    """Host memory for one version, verified by the digest of each tensor."""

    gpu = ""

    def __init__(self, content: Bytes, manifest: Manifest, buckets: Sequence[Bucket]) -> None:
        self._content = content
        self._manifest = manifest
        self.parts = [content[each.start :][: each.size_bytes] for each in buckets]
        self.pieces: list[torch.Tensor] = [torch.as_tensor(each) for each in self.parts]

    def wrong(self) -> EngineFailed | None:
        """Why these are not the bytes that were published; None if they are."""
        tensor = first_mismatch(self._content, self._manifest.tensors)
        return wrong_bytes(tensor.name) if tensor is not None else None


class GpuBuffer:
    """Memory of the engine's GPU for one version, verified by the checksum of each bucket."""

    def __init__(self, memory: SpareGpuMemory, buckets: Sequence[Bucket]) -> None:
        """Raises CannotFetch where there is no room."""
        self.gpu = memory.gpu
        try:
            self.pieces = memory.take([each.size_bytes for each in buckets])
        except (CudaError, RuntimeError) as error:
            why = f"no room for a second copy of the weights on the GPU: {first_line(error)}"
            raise CannotFetch(why) from error
        self.parts = self.pieces
        self._buckets = buckets

    def wrong(self) -> EngineFailed | None:
        """Why these are not the bytes that were published; None if they are."""
        bucket = first_wrong(self.pieces, self._buckets)
        return wrong_bucket(bucket) if bucket is not None else None


ReceiveBuffer = HostBuffer | GpuBuffer


def receive(
    offer: Offer, seat: tuple[int, int], kept: KeptGroup, place: Callable[[], ReceiveBuffer]
) -> ReceiveBuffer:
    """Receive an offer into the buffer that `place` makes, and verify it; blocks.

    `seat`: rank, and ranks in all. `place` raises CannotFetch where there is no room.

    Raises:
        CannotFetch: there was no broadcast, or it broke.
        EngineFailed: other bytes came than were published.
    """
    rendezvous = WorkerRendezvous(offer.at, offer.backend, seat, kept)
    try:
        buffer = place()
    except CannotFetch as error:
        rendezvous.join(problem=str(error))  # or the others would wait for this rank
        rendezvous.close()
        raise
    rendezvous.join(gpu=buffer.gpu)
    try:
        rendezvous.receive(buffer.pieces)
        wrong = buffer.wrong()
    except RuntimeError as error:
        why = f"what came could not be verified: {first_line(error)}"
        rendezvous.report(why)  # or the others would wait for this rank
        buffer.pieces.clear()
        raise CannotFetch(why) from error
    except BaseException:
        rendezvous.close()
        buffer.pieces.clear()  # the error remembers this frame, and memory is short
        raise
    rendezvous.report(wrong.problem.message if wrong is not None else "")
    if wrong is not None:
        buffer.pieces.clear()
        raise wrong
    return buffer
