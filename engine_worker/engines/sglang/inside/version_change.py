"""A change of weights in a scheduler process, between two of its steps.

What runs is dealt with as asked, in the scheduler itself, which alone knows what runs. New requests
get a namespace of the prefix cache for each version, so that none finds KV of older weights: the
cache need not be flushed, which SGLang refuses while anything is queued.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rolloutbus.engine_worker.engine import InFlight
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.types import Scheduler, SchedulerRequest


class Cost(NamedTuple):
    """Requests that had to make way."""

    n_retracted: int = 0
    n_aborted: int = 0


TellEnd = Callable[[Sequence[SchedulerRequest]], None]
"""Called with requests that are about to be aborted."""


def namespace_of(key: str | None, version: int) -> str | None:
    """Of the prefix cache, for requests with a key of their own, an adapter's say, or without."""
    return f"{key or ''}@weights{version}" if version else key


class VersionChange:
    """What a change of weights does to the requests of one scheduler."""

    def __init__(self, scheduler: Scheduler, tell_end: TellEnd) -> None:
        self._scheduler = scheduler
        self._tell_end = tell_end
        self._version = 0

    def admit(self, request: SchedulerRequest) -> None:
        """A request is queued, again perhaps: it shall find no KV but of the present weights."""
        if not hasattr(request, "rolloutbus_extra_key"):
            request.rolloutbus_extra_key = request.extra_key
        request.extra_key = namespace_of(request.rolloutbus_extra_key, self._version)

    def use(self, version: int) -> None:
        """From now on requests are admitted to these weights."""
        self._version = version
        for request in self._scheduler.waiting_queue:
            self.admit(request)

    @property
    def running(self) -> list[SchedulerRequest]:
        """Requests that hold KV."""
        scheduler = self._scheduler
        found: dict[int, SchedulerRequest] = {}
        for batch in (scheduler.running_batch, scheduler.last_batch):
            for request in batch.reqs if batch is not None else ():
                found[id(request)] = request
        if scheduler.chunked_req is not None:
            found[id(scheduler.chunked_req)] = scheduler.chunked_req
        return [request for request in found.values() if not request.finished()]

    def may_begin(self, in_flight: InFlight) -> bool:
        """Whether the change need not wait for another step."""
        match in_flight:
            case "finish_old":
                return not self.running
            case "keep":
                # A request's first tokens tell which weights its prompt's KV is of: none may be
                # half computed.
                return self._scheduler.chunked_req is None
            case _:
                return True

    def make_way(self, in_flight: InFlight) -> Cost:
        """Do with what runs as asked; the scheduler is halted then, or has nothing to do."""
        if in_flight == "keep" and self._scheduler.chunked_req is None:
            return Cost()
        running = self.running
        if not running:
            return Cost()
        self._scheduler.pause_generation(
            upstream.request("PauseGenerationReqInput", mode="retract")
        )
        # With overlapped steps the last one was booked only now, and may have ended some.
        running = [request for request in running if not request.finished()]
        if in_flight != "abort":
            return Cost(n_retracted=len(running))
        self._tell_end(running)
        for request in running:
            self._scheduler.abort_request(upstream.request("AbortReq", rid=request.rid))
        return Cost(n_aborted=len(running))
