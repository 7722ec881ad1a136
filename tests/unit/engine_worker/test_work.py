"""What a client asked for reaches the engine, all of it."""

import numpy as np

from rolloutbus.bus.wire.codec import pack
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.messages.generation import (
    NOTHING_MORE,
    Generate,
    Grammar,
    Media,
    Prefix,
    Processor,
    SamplingParams,
    Want,
)
from rolloutbus.engine_worker.host.__main__ import work_of

PROMPT = np.array([1, 2], np.int32)


def test_work_has_everything_that_was_asked_for() -> None:
    prefix = Prefix(b"\x01\x00\x00\x00", bytes(4), [(0, 1)])
    body = Generate(
        PROMPT.tobytes(),
        SamplingParams(9, stop=["."]),
        stream=True,
        prefix=prefix,
        lora="judge@3",
        want=Want(top_logprobs=2),
        grammar=Grammar("regex", "a+"),
        processors=[Processor("mask", {"ids": [1]})],
        media=[Media("image", b"x")],
    )
    place = Placement("default", session="conv-1", priority=-7)
    work = work_of(Entry("generate", "c/1", (1, 2), place=place, body=pack(body)), body)
    assert work.key == ("c/1", (1, 2))
    assert work.prompt.tolist() == [1, 2]
    assert (work.sampling, work.prefix, work.stream) == (body.sampling, prefix, True)
    assert (work.lora, work.want, work.grammar) == ("judge@3", body.want, body.grammar)
    assert (work.processors, work.media) == (body.processors, body.media)
    assert (work.priority, work.session) == (-7, "conv-1")


def test_work_without_wishes_is_plain() -> None:
    body = Generate(PROMPT.tobytes(), SamplingParams(9))
    work = work_of(Entry("generate", "c/1", (1, 2), body=pack(body)), body)
    assert (work.stream, work.lora, work.want) == (False, "", NOTHING_MORE)
    assert (work.priority, work.session) == (0, "")
