"""The weights of one scheduler process: when they change, and what is reported of it.

What runs is dealt with as asked, in the scheduler itself, which alone knows what runs. New requests
get a namespace of the prefix cache for each version, so that none finds KV of older weights: the
cache need not be flushed, which SGLang refuses while anything is queued.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rolloutbus.engine_worker.engine import InFlight
from rolloutbus.engine_worker.engines.sglang.inside.model_tensors import ModelTensors, Ranks
from rolloutbus.engine_worker.engines.sglang.schedulers.wire import (
    Answered,
    FindTensors,
    GiveBackSpares,
    Halt,
    Install,
    Message,
    Order,
    Read,
    SchedulerAnswer,
    SchedulerRank,
    Stage,
    Swapped,
    Unstage,
    VersionStaged,
    order_of,
)
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.hooks import Call
from rolloutbus.engine_worker.engines.sglang.upstream.types import (
    Scheduler,
    SchedulerBatch,
    SchedulerRequest,
    SglangObject,
)


class Cost(NamedTuple):
    """Requests that had to make way."""

    n_retracted: int = 0
    n_aborted: int = 0


TellEnd = Callable[[Sequence[SchedulerRequest]], None]
"""Called with requests that are about to be aborted."""


def namespace_of(key: str | None, version: int) -> str | None:
    """Of the prefix cache, for requests with a key of their own, an adapter's say, or without."""
    return f"{key or ''}@weights{version}" if version else key


def is_staged(scheduler: Scheduler) -> bool:
    """Whether it is a stage of a pipeline, of which each works on several batches by turns."""
    return hasattr(scheduler, "running_mbs")


def batches_of(scheduler: Scheduler) -> list[SchedulerBatch]:
    """What may hold requests that run."""
    if is_staged(scheduler):
        found = [*scheduler.running_mbs, *scheduler.last_mbs, *scheduler.mbs]
    else:
        found = [scheduler.running_batch, scheduler.last_batch]
    return [batch for batch in found if batch is not None]


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
        for batch in batches_of(scheduler):
            for request in batch.reqs:
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

    @property
    def is_drained(self) -> bool:
        """Whether a stage has launched nothing that is still to be booked, by any other stage.

        What this one has booked is on its way to the next.
        """
        scheduler = self._scheduler
        return not is_staged(scheduler) or all(batch is None for batch in scheduler.mbs)

    def retract(self) -> None:
        """Put all that runs back into the queue; nothing is launched and not booked."""
        scheduler = self._scheduler
        request = upstream.request("PauseGenerationReqInput", mode="retract")
        if not is_staged(scheduler):
            scheduler.pause_generation(request)
            return
        turn, done = scheduler.running_batch, set[int]()
        for slot, running in enumerate(scheduler.running_mbs):
            last = scheduler.last_mbs[slot]
            # What is in two turns, as a prompt that is computed in pieces may be, goes back once.
            batches = [batch for batch in (running, last) if batch is not None]
            for batch in batches:
                batch.reqs = [req for req in batch.reqs if id(req) not in done]
            done |= {id(req) for batch in batches for req in batch.reqs}
            scheduler.running_batch, scheduler.last_batch = running, last
            scheduler.pause_generation(request)
            scheduler.last_mbs[slot] = None
        scheduler.running_batch = turn

    def make_way(self, in_flight: InFlight) -> Cost:
        """Do with what runs as asked; the scheduler is halted then, or has nothing to do."""
        if in_flight == "keep" and self._scheduler.chunked_req is None:
            return Cost()
        running = self.running
        if not running:
            return Cost()
        self.retract()
        # With overlapped steps the last one was booked only now, and may have ended some.
        running = [request for request in running if not request.finished()]
        if in_flight != "abort":
            return Cost(n_retracted=len(running))
        self._tell_end(running)
        for request in running:
            self._scheduler.abort_request(upstream.request("AbortReq", rid=request.rid))
        return Cost(n_aborted=len(running))


ASLEEP = "weights"
"""SGLang's tag of weights whose memory is released."""


class SchedulerWeights:
    """Hooks into a scheduler, each called in place of a method of SGLang's, which it calls."""

    def __init__(
        self,
        rank: SchedulerRank,
        tell: Callable[[Message], None],
        end: Callable[[Sequence[SchedulerRequest]], None],
        set_version: Callable[[int], None],
    ) -> None:
        """Until `take_over` no hook is called.

        Args:
            rank: which scheduler it is.
            tell: sends a message to the engine host; any thread may call it.
            end: tells the host the end of requests that are about to be aborted.
            set_version: called with the version of the steps to come.
        """
        self._rank = rank
        self._tell = tell
        self._end = end
        self._set_version = set_version
        self._version = 0
        self._due: Install | None = None
        """Waits for its moment."""
        self._is_paused = False
        """As the host wants it."""
        self._is_changing = False
        self._must_retract = False
        """A pause has come, and what the stages have launched is still to be booked."""
        self._keeps_account = False

    def take_over(self, scheduler: Scheduler) -> None:
        """Work for this scheduler of SGLang's, which is being built."""
        self._scheduler = scheduler
        self._change = VersionChange(scheduler, self._end)
        self._made: ModelTensors | None = None

    def keep_account(self) -> None:
        """Tell SGLang the version of its weights, now and at each change; it can count tokens."""
        self._keeps_account = True
        self._scheduler.record_weight_version_change(new_version=str(self._version))

    def answer(self, call: Call, updater: object, request: SglangObject) -> object:
        """Around the request for a weight by name."""
        found = order_of(request.name)
        if found is None:
            return call(updater, request)
        number, order = found
        try:
            answer = self._carry_out(order)
        except Exception as error:  # noqa: BLE001 - whatever it is, SGLang would die of it
            answer = SchedulerAnswer(problem=f"{type(error).__name__}: {error}"[:500])
        self._tell(Answered(number, answer))
        # SGLang waits for one of these from each replica, which says nothing of the others.
        return upstream.request("GetWeightsByNameReqOutput", parameter=[])

    def admit(self, request: SchedulerRequest) -> None:
        """A request is about to be queued."""
        self._change.admit(request)

    def plan(self, call: Call, scheduler: Scheduler, *args: object, **kwargs: object) -> object:
        """Around the choice of the next batch."""
        if is_staged(scheduler) and self._stands_still():
            return upstream.no_batch(scheduler.running_batch)
        if self._due is not None and self._change.may_begin(self._due.in_flight):
            self._install(self._due)
        if self._due is None:
            return call(scheduler, *args, **kwargs)
        # What runs gets on, and nothing new begins.
        held: Sequence[SchedulerRequest] = scheduler.waiting_queue
        scheduler.waiting_queue = []
        try:
            return call(scheduler, *args, **kwargs)
        finally:
            scheduler.waiting_queue = [*scheduler.waiting_queue, *held]

    def _stands_still(self) -> bool:
        """Do what is due of a stage; whether it takes no step now.

        All stages get the same commands at the same step of theirs, and have the same requests. So
        whatever is decided by these alone, when a batch is chosen, they all do before the same
        step. They wait for each other while weights change, and so only when each has got all that
        it needs from the others: with nothing launched.
        """
        if self._must_retract:
            if self._change.is_drained:
                self._must_retract, self._is_changing = False, True
                self._change.retract()
                self._is_changing = False
            return True
        due = self._due
        if due is not None and self._change.may_begin(due.in_flight):
            if self._change.is_drained:
                self._install(due)
            return True
        return upstream.is_halted(self._scheduler)

    def pause(self, call: Call, scheduler: Scheduler, request: object) -> object:
        """Around a pause."""
        if is_staged(scheduler) and not self._is_changing:
            # SGLang would look at one batch of several.
            self._is_paused = self._must_retract = True
            return upstream.halt(scheduler)
        result = call(scheduler, request)
        if not self._is_changing:
            self._is_paused = True
            if self._due is not None:
                self._settle_paused(self._due)
        return result

    def go_on(self, call: Call, scheduler: object, request: object) -> object:
        """Around the end of a pause."""
        result = call(scheduler, request)
        if not self._is_changing:
            self._is_paused = self._must_retract = False
            if self._tensors.is_torn:
                upstream.halt(self._scheduler)
        return result

    def _carry_out(self, order: Order) -> SchedulerAnswer:
        match order:
            case FindTensors():
                return self._tensors.survey(order)
            case Stage():
                threading.Thread(target=self._stage, args=(order,), name="stage").start()
            case Unstage(version=version):
                if self._due is not None and self._due.version == version:
                    given_up, self._due = self._due, None
                    self._refuse(given_up, "the version was given up")
                self._tensors.drop(version)
            case GiveBackSpares():
                self._tensors.give_back_spares()
            case Install():
                self._take(order)
            case Halt():
                self._tensors.is_torn = True
                upstream.halt(self._scheduler)
            case Read():
                return self._read(order)
        return SchedulerAnswer(version=self._version)

    def _stage(self, order: Stage) -> None:
        self._tell(VersionStaged(order.version, self._tensors.stage(order)))

    def _take(self, order: Install) -> None:
        if not self._tensors.has(order.version):
            problem = f"version {order.version} is not staged"
            self._tell(Swapped(order.version, 0.0, problem=problem))
        elif self._due is not None:
            self._refuse(order, f"version {self._due.version} is on its way")
        elif self._are_asleep:
            self._refuse(order, "the weights are asleep: wake them up before an update")
        elif self._never_ends(order):
            self._refuse(order, "torn weights take no steps: finish_old would never end")
        elif is_staged(self._scheduler):
            self._due = order  # a stage that waited here for the others would wait for ever
        elif self._is_paused:
            self._settle_paused(order)
        elif self._change.may_begin(order.in_flight):
            self._install(order)
        else:
            self._due = order

    def _never_ends(self, order: Install) -> bool:
        is_waiting = order.in_flight == "finish_old" and bool(self._change.running)
        return is_waiting and self._tensors.is_torn

    def _settle_paused(self, due: Install) -> None:
        """Nothing that runs gets on: now or never."""
        self._due = None
        if due.in_flight == "finish_old" and self._change.running:
            self._refuse(due, "paused with requests running: finish_old would never end")
        else:
            self._install(due)

    def _refuse(self, order: Install, problem: str) -> None:
        self._tell(Swapped(order.version, 0.0, problem=problem, is_busy=True))

    def _install(self, due: Install) -> None:
        began = time.perf_counter()
        self._due = None
        self._is_changing = True
        try:
            cost = self._change.make_way(due.in_flight)
            problem, is_torn = self._tensors.overwrite(due.version)
            if not problem:
                self._become(due.version)
            self._release(is_halted=self._is_paused or is_torn)
        finally:
            self._is_changing = False
        stall_ms = (time.perf_counter() - began) * 1e3
        self._tell(Swapped(due.version, stall_ms, *cost, problem=problem, is_torn=is_torn))

    def _become(self, version: int) -> None:
        self._version = version
        self._set_version(version)
        self._change.use(version)
        if self._keeps_account:
            self._scheduler.record_weight_version_change(new_version=str(version))

    def _release(self, *, is_halted: bool) -> None:
        """Take steps again, or none."""
        if is_halted:
            upstream.halt(self._scheduler)
        else:
            self._scheduler.continue_generation(
                upstream.request("ContinueGenerationReqInput", torch_empty_cache=False)
            )

    def _read(self, order: Read) -> SchedulerAnswer:
        if self._tensors.is_torn:
            problem = "the weights are half overwritten: they are of no version"
            return SchedulerAnswer(problem=problem, is_busy=True)
        if self._are_asleep:
            return SchedulerAnswer(problem="the weights are asleep", is_busy=True)
        if self._rank.dp == 0:  # the others have the same
            self._tensors.read(order)
        return SchedulerAnswer(version=self._version)

    @property
    def _tensors(self) -> ModelTensors:
        """Made when they are first needed: after the model."""
        if self._made is None:
            scheduler = self._scheduler
            ranks = everyone = Ranks(scheduler.tp_cpu_group)
            if is_staged(scheduler):
                everyone = Ranks(scheduler.world_group.cpu_group)
            runner = scheduler.tp_worker.model_runner
            self._made = ModelTensors(runner, ranks, everyone, self._is_computing)
        return self._made

    def _is_computing(self) -> bool:
        return not self._is_paused and bool(self.running)

    @property
    def running(self) -> list[SchedulerRequest]:
        """Requests that hold KV."""
        return self._change.running

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is to be done but what a command begins."""
        return self._due is None and not self._must_retract and self._change.is_drained

    @property
    def _are_asleep(self) -> bool:
        return ASLEEP in self._scheduler.weight_updater.offload_tags
