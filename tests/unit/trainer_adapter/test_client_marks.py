"""A client tells how its prompts begin, when the router asks for it."""

import numpy as np

from rolloutbus.bus.prefix_hashes import marks_of
from rolloutbus.bus.wire.entry import Placement
from rolloutbus.bus.wire.messages.generation import Generate, Media, SamplingParams
from rolloutbus.bus.wire.messages.membership import Member, Members, Welcome
from rolloutbus.trainer_adapter.client.core.requests import Ask
from tests.unit.trainer_adapter.bench import Bench

PROMPT = np.arange(200, dtype="<i4").tobytes()
MEMBER = Member("w0", "b.1", "ipc:///w0", "live", 0, "default")


def sent_marks(bench: Bench, **body: object) -> bytes:
    """The marks of a request that is submitted now."""
    ask = Ask(
        "generate",
        Generate(PROMPT, SamplingParams(max_new_tokens=8), **body),  # type: ignore[arg-type] - fields of Generate
        place=Placement("default"),
    )
    bench.apply(bench.core.submit(ask, 60.0, bench.clock.now())[1])
    place = bench.take("generate")[-1].place
    assert place is not None
    return place.marks


def linked(*, marks: bool) -> Bench:
    bench = Bench()
    bench.say("welcome", Welcome(1, "r1", 1, [MEMBER], marks=marks))
    return bench


def test_a_router_that_asks_for_marks_gets_those_of_the_prompt() -> None:
    assert sent_marks(linked(marks=True)) == marks_of(PROMPT) != b""


def test_a_router_that_does_not_ask_gets_none() -> None:
    assert sent_marks(linked(marks=False)) == b""


def test_a_router_may_begin_to_ask_and_stop() -> None:
    bench = linked(marks=False)
    bench.say("members", Members([MEMBER], marks=True))
    assert sent_marks(bench)
    bench.say("members", Members([MEMBER], marks=False))
    assert not sent_marks(bench)


def test_what_the_prompt_alone_does_not_tell_has_no_marks() -> None:
    bench = linked(marks=True)
    assert not sent_marks(bench, lora="math")
    assert not sent_marks(bench, media=[Media("image", b"png")])
