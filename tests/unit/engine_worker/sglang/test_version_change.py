"""Requests find no KV of older weights, and a change waits for what it must not cut in two."""

from dataclasses import dataclass, field

import pytest

from rolloutbus.bus.wire.messages.weights import InFlight
from rolloutbus.engine_worker.engines.sglang.inside.scheduler_weights import VersionChange


@dataclass(eq=False)
class Request:
    """As SGLang's scheduler has it."""

    rid: str
    extra_key: str | None = None
    is_over: bool = False

    def finished(self) -> bool:
        return self.is_over


@dataclass
class Batch:
    reqs: list[Request]


@dataclass
class Scheduler:
    """What of SGLang's is looked at; nothing of it runs."""

    running_batch: Batch = field(default_factory=lambda: Batch([]))
    last_batch: Batch | None = None
    chunked_req: Request | None = None
    waiting_queue: list[Request] = field(default_factory=list[Request])


def change_of(scheduler: Scheduler) -> VersionChange:
    return VersionChange(scheduler, lambda _: None)  # pyright: ignore[reportArgumentType] - a part of it


def admitted(change: VersionChange, request: Request) -> Request:
    change.admit(request)  # pyright: ignore[reportArgumentType] - a part of it
    return request


@pytest.mark.parametrize("key", [None, "", "lora-7"])
def test_requests_share_a_prefix_only_within_a_version(key: str | None) -> None:
    change = change_of(Scheduler())
    keys = {admitted(change, Request("a", key)).extra_key}
    for version in (1, 2, 12):
        change.use(version)
        keys.add(admitted(change, Request("a", key)).extra_key)
    assert len(keys) == len([0, 1, 2, 12])


def test_before_the_first_update_namespaces_are_as_they_were() -> None:
    change = change_of(Scheduler())
    assert admitted(change, Request("a")).extra_key is None
    assert admitted(change, Request("a", "lora-7")).extra_key == "lora-7"


def test_adapters_stay_apart_after_an_update() -> None:
    change = change_of(Scheduler())
    change.use(1)
    mine, yours = (admitted(change, Request("a", key)).extra_key for key in ("mine", "yours"))
    assert mine != yours


def test_what_waits_moves_to_the_new_version() -> None:
    waiting = Request("a", "lora-7")
    change = change_of(Scheduler(waiting_queue=[waiting]))
    admitted(change, waiting)
    for version in (1, 2):
        change.use(version)
        assert waiting.extra_key == admitted(change, Request("b", "lora-7")).extra_key


@pytest.mark.parametrize(
    ("in_flight", "may"),
    [("keep", True), ("retract", True), ("abort", True), ("finish_old", False)],
)
def test_finish_old_waits_for_what_runs(in_flight: InFlight, *, may: bool) -> None:
    running = Request("a")
    change = change_of(Scheduler(running_batch=Batch([running])))
    assert change.may_begin(in_flight) == may
    running.is_over = True
    assert change.may_begin(in_flight)


@pytest.mark.parametrize(
    ("in_flight", "may"),
    [("keep", False), ("retract", True), ("abort", True), ("finish_old", False)],
)
def test_a_prompt_is_not_computed_half_by_old_weights(in_flight: InFlight, *, may: bool) -> None:
    scheduler = Scheduler(chunked_req=Request("a"))
    change = change_of(scheduler)
    assert change.may_begin(in_flight) == may
    scheduler.chunked_req = None
    assert change.may_begin(in_flight)


def test_whoever_is_in_two_batches_runs_once() -> None:
    both, last, over = Request("a"), Request("b"), Request("c", is_over=True)
    change = change_of(Scheduler(Batch([both, over]), Batch([both, last]), last))
    assert change.running == [both, last]
