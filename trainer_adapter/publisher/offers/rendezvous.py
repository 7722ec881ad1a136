"""The place where the ranks of one broadcast meet: a key-value store that the trainer serves."""

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from rolloutbus.bus.weights.rendezvous import (
    END,
    GO,
    TIMEOUT,
    WORLD,
    RankReport,
    done_key,
    joined_key,
    read_report,
    read_world,
)

_LOOK_S = 0.005
"""Between two looks at keys that workers write; a look costs microseconds here."""
_HEARD_S = 2.0


class Rendezvous:
    """Serves from construction to `close`, on one event loop."""

    def __init__(self, host: str, timeout_s: float) -> None:
        """Listen at the address `host`, on any free port."""
        with socket.create_server((host, 0), family=_family(host)) as listening:
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
        """While ranks are waited for."""
        self._why_not = f"was not there within {timeout_s:g} s"

    def client(self) -> dist.Store:  # pyright: ignore[reportPrivateImportUsage]
        """Another connection to it, for a thread that may block."""
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            self.host,
            self.port,
            is_master=False,
            timeout=timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
        )

    async def world(self) -> int:
        """Ranks in all, as soon as the first worker is there. Raises BadReport."""
        await self._written(WORLD)
        return read_world(self._store.get(WORLD))

    async def joined(self, world: int) -> list[RankReport]:
        """Reports of ranks 1 to `world` - 1; of who does not come in time, that it did not."""
        return await self._reports([joined_key(rank) for rank in range(1, world)])

    async def done(self, world: int) -> list[RankReport]:
        """The same at their ends."""
        return await self._reports([done_key(rank) for rank in range(1, world)])

    async def heard(self, reports: Sequence[RankReport]) -> None:
        """Wait a moment until all who have come know why nothing is sent: with us, that is gone."""
        came = [rank for rank, report in enumerate(reports, 1) if not report.problem]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEARD_S):
                for rank in came:
                    await self._written(done_key(rank))

    def go(self, why_not: str) -> None:
        """Tell those who wait to begin, or why nothing will come; only the first word counts."""
        if not self._store.check([GO]):
            self._store.set(GO, why_not)

    def call_off(self) -> None:
        """Begin nothing, if it has not begun; what waits here goes on at once."""
        if self._store.check([GO]):
            return
        self._why_not = "was told anew"
        self.go("the workers were told anew")
        if self._gathering is not None:
            self._gathering.reschedule(asyncio.get_running_loop().time())

    def end(self) -> None:
        """Tell those who wait, whatever for, that it is over."""
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


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
