"""`collective`: the trainer broadcasts the weights to all workers of an update at once.

Spec: docs/protocol.md, "Collective".
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from typing import Literal

import torch
import torch.distributed as dist

from rolloutbus.bus.actor.loop import in_daemon_thread
from rolloutbus.bus.strict_calls import strict
from rolloutbus.bus.weights.rank_group import (
    END,
    GO,
    GROUP_NAME,
    MAX_TIMEOUT_MS,
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
    read_report,
    read_world,
    why_not,
)
from rolloutbus.bus.weights.shm import host_id
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.messages.weights import Bucket, Offer, Tensor
from rolloutbus.trainer_adapter.publisher.offering import (
    checksums_of,
    fill,
    gpu_uuid,
    only_gpu,
    spans_of,
)
from rolloutbus.trainer_adapter.publisher.tensor_source import QueuedWork
from rolloutbus.trainer_adapter.publisher.weight_writer import in_thread

_LOOK_S = 0.005
"""Pause between two looks at keys that workers write; a look costs microseconds here."""
_HEARD_S = 2.0


class Rendezvous:
    """The key-value store where ranks meet; serves until `close`, on one event loop."""

    def __init__(self, host: str, timeout_s: float) -> None:
        """Listen at the address `host`, which is no name, on any free port."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listening:
            self.host, self.port = host, int(listening.getsockname()[1])
            # Without a descriptor of ours it would listen on every address of this host.
            self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                host,
                self.port,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        self._store.set(TIMEOUT, str(round(timeout_s * 1e3)))
        self._timeout_s = timeout_s
        self._gathering: asyncio.Timeout | None = None
        """Timeout of the present wait for the ranks' reports; None while there is none."""
        self._why_not = f"was not there within {timeout_s:g} s"

    def client(self) -> dist.Store:  # pyright: ignore[reportPrivateImportUsage]
        """Returns another connection to the key-value store, for a thread that may block."""
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            self.host,
            self.port,
            is_master=False,
            timeout=timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
        )

    async def world(self) -> int:
        """Returns the number of ranks as soon as the first worker has joined. Raises BadReport."""
        await self._written(WORLD)
        return read_world(self._store.get(WORLD))

    async def joined(self, world: int) -> list[RankReport]:
        """Returns a report for each of ranks 1 to `world` - 1; a late rank's has a problem."""
        return await self._reports([joined_key(rank) for rank in range(1, world)])

    async def done(self, world: int) -> list[RankReport]:
        """Returns each rank's report at its end of the transfer; a late rank's has a problem."""
        return await self._reports([done_key(rank) for rank in range(1, world)])

    async def heard(self, reports: Sequence[RankReport]) -> None:
        """Waits a moment until all ranks that joined have read why the trainer sends nothing."""
        came = [rank for rank, report in enumerate(reports, 1) if not report.problem]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEARD_S):
                for rank in came:
                    await self._written(done_key(rank))

    def go(self, why_not: str, group: str = "") -> str:
        """Tells waiting ranks to begin in this group, or why not; only the first call counts.

        Returns what counts: empty, or why not.
        """
        if not self._store.check([GO]):
            self._store.set(GROUP_NAME, group)
            self._store.set(GO, why_not)
        return self._store.get(GO).decode()

    def call_off(self) -> None:
        """Cancels the transfer unless it has begun; the wait for ranks' reports ends at once."""
        if self._store.check([GO]):
            return
        self._why_not = "got new commands"
        self.go("the workers got new commands")
        if self._gathering is not None:
            self._gathering.reschedule(asyncio.get_running_loop().time())

    def end(self) -> None:
        """Tells all waiting ranks that the rendezvous has ended."""
        self.go("the trainer has given up")
        self._store.set(END, "")

    async def _reports(self, keys: list[str]) -> list[RankReport]:
        reports: list[RankReport] = []
        try:
            async with asyncio.timeout(self._timeout_s) as self._gathering:
                for key in keys:
                    await self._written(key)
                    reports.append(read_report(self._store.get(key)))
        except TimeoutError:
            reports += [RankReport(problem=self._why_not)] * (len(keys) - len(reports))
        finally:
            self._gathering = None
        return reports

    async def _written(self, key: str) -> None:
        # A wait of the store would block a thread, and every other call with it.
        while not self._store.check([key]):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)


async def _address_of(host: str, timeout_s: float) -> str:
    """The address that a host's name stands for, of IPv4 if it has one; of an address itself.

    Raises:
        SettingsError: there is no such host.
        OSError: this cannot be found out now.
    """
    look_up = partial(socket.getaddrinfo, host, 0, socket.AF_UNSPEC, socket.SOCK_STREAM)
    try:
        async with asyncio.timeout(timeout_s):
            # Nothing can stop it: at its end Python would wait for any other thread.
            found = await in_daemon_thread(look_up, "rolloutbus-resolve")
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from error
    except (socket.gaierror, UnicodeError) as error:
        if isinstance(error, socket.gaierror) and error.errno not in _NO_SUCH_HOST:
            raise
        raise SettingsError(f"host: {host!r} cannot be resolved: {first_line(error)}") from error
    nearest = min(found, key=lambda each: each[0] != socket.AF_INET)
    return str(nearest[4][0])


_NO_SUCH_HOST = {socket.EAI_NONAME, socket.EAI_NODATA}


BUCKET_BYTES = 256 << 20
_CPU = torch.device("cpu")
_log = logging.getLogger(__name__)


@strict()
class CollectiveOffering:
    """See `Offering`. Holds a second copy of the weights, from version to version.

    A group is made of the workers that the router chose, and kept as long as it chooses the same
    ones and nothing fails: to make one over nccl takes longer than to send a model.
    """

    def __init__(
        self,
        backend: Literal["gloo", "nccl"] = "gloo",
        *,
        host: str = "127.0.0.1",
        timeout_s: float = 60.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Choose how and where.

        Args:
            backend: `gloo` through host memory; `nccl` from GPU to GPU, for tensors on one GPU
                that no worker uses.
            host: address or name of this host that workers meet at. Neither gloo nor nccl asks who
                is there or hides what it sends: another one than loopback only on a network where
                everybody may read the weights.
            timeout_s: for all to come, and then for all to have it; at most a day.
            bucket_bytes: size of the pieces.

        Raises:
            SettingsError: a value is none of these.
        """
        if not 1 <= timeout_s * 1e3 <= MAX_TIMEOUT_MS:
            raise SettingsError(f"timeout_s: from 0.001 s to a day, not {timeout_s:g}")
        if not host:
            raise SettingsError("host: an address of this host, not nothing")
        if bucket_bytes < 1:
            raise SettingsError(f"bucket_bytes: at least 1, not {bucket_bytes}")
        self._backend = backend
        self._host = host
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._pieces: list[torch.Tensor] = []
        self._device = _CPU
        self._rendezvous: Rendezvous | None = None
        self._kept = KeptGroup()
        self._home: Rendezvous | None = None
        """Where the kept group was made, which needs it."""
        self.problem = ""
        """Why some worker did not get the last version this way; empty if all workers got it."""
        self.broadcast_s = 0.0
        """How long the last broadcast took, without what came before and after it."""

    @property
    def held_bytes(self) -> int:
        """Memory that is held for versions."""
        return sum(len(each) for each in self._pieces)

    async def prepare(
        self, layout: Sequence[Tensor], tensors: Sequence[torch.Tensor]
    ) -> list[Offer]:
        """See `Offering`.

        Raises:
            SettingsError: there is no such `host`.
        """
        await self.close()
        device = _CPU if self._backend == "gloo" else only_gpu(tensors)
        if device is None:
            return []
        if device != self._device:
            self._kept.close()  # its links are those of the other one
        self._device, self.problem = device, "no worker has asked for it"
        queued = QueuedWork(tensors)
        try:
            address = await _address_of(self._host, self._timeout_s)
        except OSError as error:  # those who wait for the version take it another way
            self.problem = f"host: {self._host!r} cannot be resolved now: {first_line(error)}"
            _log.warning("%s", self.problem)
            return []
        try:
            # To its end: it would go on alone, and into the next version.
            buckets = await in_thread(partial(self._copy, layout, tensors, queued))
        except torch.OutOfMemoryError as error:
            self.forget()
            self.problem = f"no room for a copy of the weights: {first_line(error)}"
            _log.warning("%s", self.problem)
            return []
        try:
            self._rendezvous = Rendezvous(address, self._timeout_s)
        except (OSError, RuntimeError) as error:
            self.problem = f"no rendezvous at {self._host}: {first_line(error)}"
            _log.warning("%s", self.problem)
            return []
        is_local = ip_address(address.partition("%")[0]).is_loopback
        return [
            Offer(
                "collective",
                at=f"{address}:{self._rendezvous.port}",
                host=host_id() if is_local else "",
                backend=self._backend,
                buckets=buckets,
            )
        ]

    async def serve(self) -> None:
        """Wait for the workers, send, and wait until all have it."""
        rendezvous = self._rendezvous
        if rendezvous is None:
            return
        try:
            self.problem = await self._send(rendezvous)
        except (BadReport, BrokenGroup, RuntimeError) as error:
            self.problem = first_line(error)
        finally:
            rendezvous.end()
        if self.problem:
            _log.warning("collective transfer failed: %s", self.problem)

    def call_off(self) -> None:
        """Cancels the rendezvous; ranks that wait there use another transport at once."""
        if self._rendezvous is not None:
            self._rendezvous.call_off()

    async def close(self) -> None:
        """Ends the rendezvous; a rank that still waits there uses another transport."""
        rendezvous, self._rendezvous = self._rendezvous, None
        if rendezvous is not None:
            rendezvous.end()

    def forget(self) -> None:
        """Free the copy, and let go of the workers."""
        self._pieces = []
        self._kept.close()
        self._home = None

    async def _send(self, rendezvous: Rendezvous) -> str:
        """Sends the weights; returns why not all ranks have them, or empty if all have."""
        world = await rendezvous.world()
        gpu = gpu_uuid(self._device) if self._device.type == "cuda" else ""
        reports = await rendezvous.joined(world)
        kept = self._kept_by_all(reports)
        name = kept.name if kept is not None else secrets.token_hex(8)
        problem = rendezvous.go(why_not(gpu, reports), name)
        if problem:
            if kept is not None:
                kept.close()  # the ranks let go of it, too
            await rendezvous.heard(reports)
            return problem
        seat = Seat(self._backend, 0, world, rendezvous.host, self._timeout_s)
        pieces = self._pieces
        is_given_up = threading.Event()

        def broadcast() -> RankGroup:
            group = kept or RankGroup(dist, rendezvous.client(), seat, name)
            began = time.perf_counter()
            try:
                group.broadcast(pieces)
                self.broadcast_s = time.perf_counter() - began
            except BaseException:
                group.close()
                raise
            if is_given_up.is_set():
                group.close()
            return group

        try:
            group = await in_daemon_thread(broadcast, "rolloutbus-broadcast")
        except BaseException:
            is_given_up.set()
            self._pieces = []  # the thread may read them still: the next version gets others
            raise
        has_failed = True
        try:
            problem = why_not("", await rendezvous.done(world))
            has_failed = bool(problem)
            return problem
        finally:
            if has_failed:
                group.close()
            else:
                self._kept.keep(group)
                self._home = self._home if kept else rendezvous

    def _kept_by_all(self, reports: Sequence[RankReport]) -> RankGroup | None:
        """The group that was kept, if all ranks have kept it; else it is closed."""
        group = self._kept.take()
        if group is None:
            return None
        is_theirs = {each.group for each in reports} == {group.name}
        if is_theirs and group.has_seat(self._backend, 0, len(reports) + 1):
            return group
        group.close()
        return None

    def _copy(
        self, layout: Sequence[Tensor], tensors: Sequence[torch.Tensor], queued: QueuedWork
    ) -> list[Bucket]:
        queued.wait()
        spans = list(spans_of(layout, self._bucket_bytes))
        sizes, device = [each.size_bytes for each in spans], self._device
        if [(n, device) for n in sizes] != [(len(each), each.device) for each in self._pieces]:
            self._pieces = []
            self._pieces = [torch.zeros(n, dtype=torch.uint8, device=device) for n in sizes]
        for span, piece in zip(spans, self._pieces, strict=True):
            fill(piece, span, layout, tensors)
        return [
            Bucket(span.start, span.size_bytes, checksum)
            for span, checksum in zip(spans, checksums_of(self._pieces), strict=True)
        ]
