"""A stage of a pipeline changes its weights, and stands still, only where all stages do."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from rolloutbus.engine_worker.engines.sglang.inside.scheduler_weights import VersionChange


@dataclass(eq=False)
class Request:
    """As SGLang's scheduler has it."""

    rid: str
    extra_key: str | None = None

    def finished(self) -> bool:
        return False


@dataclass(eq=False)
class Batch:
    reqs: list[Request]
    is_prompt: bool = True


@dataclass
class Stage:
    """What of SGLang's is looked at when the first of two micro-batches has its turn."""

    running_mbs: list[Batch]
    last_mbs: list[Batch | None]
    mbs: list[Batch | None]
    chunked_req: Request | None = None
    waiting_queue: list[Request] = field(default_factory=list[Request])
    last_batch: Batch | None = None

    def __post_init__(self) -> None:
        self.running_batch = self.running_mbs[0]

    def pause_generation(self, request: object) -> None:
        """As SGLang's: the batch that has its turn goes back to the queue."""
        del request
        found = [*self.running_batch.reqs]
        if self.last_batch is not None and self.last_batch.is_prompt:
            found += self.last_batch.reqs
        if self.chunked_req is not None and self.chunked_req not in found:
            found.append(self.chunked_req)
        assert not {*found} & {*self.waiting_queue}, "its KV would be given back twice"
        self.waiting_queue += found
        self.running_batch.reqs, self.last_batch, self.chunked_req = [], None, None


def change_of(stage: Stage) -> VersionChange:
    return VersionChange(stage, lambda _: None)  # pyright: ignore[reportArgumentType] - a part of it


def named_fields(kind: str, **fields: object) -> object:
    return kind, fields


@pytest.fixture(autouse=True)
def struct(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang is not installed here: its command is nothing but its fields."""
    module = "rolloutbus.engine_worker.engines.sglang.inside.scheduler_weights.upstream.request"
    monkeypatch.setattr(module, named_fields)


def test_requests_of_every_micro_batch_run() -> None:
    a, b, c, d = (Request(rid) for rid in "abcd")
    stage = Stage([Batch([a]), Batch([b])], [Batch([a]), Batch([c])], [None, Batch([c])], d)
    assert {each.rid for each in change_of(stage).running} == {*"abcd"}


@pytest.mark.parametrize(
    ("launched", "is_drained"),
    [([False, False], True), ([True, False], False), ([False, True], False)],
    ids=["nothing", "on its way to the next stage", "not booked"],
)
def test_what_any_turn_has_launched_is_booked_first(
    launched: list[bool], *, is_drained: bool
) -> None:
    running = [Batch([Request("a")]), Batch([Request("b")])]
    mbs = [batch if is_out else None for batch, is_out in zip(running, launched, strict=True)]
    change = change_of(Stage(running, [None, None], mbs))
    assert change.is_drained == is_drained


def test_all_go_back_to_the_queue_once() -> None:
    a, b, c, d, chunked = (Request(rid) for rid in ("a", "b", "c", "d", "chunked"))
    decoded = Batch([d], is_prompt=False)
    running: list[Any] = [Batch([a]), Batch([b]), decoded]
    # Pieces of one prompt were computed by turns; what decodes is the same batch as before.
    last: list[Batch | None] = [Batch([chunked]), Batch([c, chunked]), decoded]
    stage = Stage(running, last, [None] * 3, chunked)
    change_of(stage).retract()
    assert sorted(each.rid for each in stage.waiting_queue) == ["a", "b", "c", "chunked", "d"]
    assert [batch.reqs for batch in stage.running_mbs] == [[], [], []]
    assert stage.last_mbs == [None, None, None]
    assert stage.running_batch is running[0]
