"""What a worker answers about versions that it holds, receives, or has never heard of."""

import msgspec

from rolloutbus.bus.weights.manifest import lay_out
from rolloutbus.bus.wire.entry import Peer
from rolloutbus.bus.wire.limits import CHUNK_BYTES
from rolloutbus.bus.wire.messages.endings import Problem
from rolloutbus.bus.wire.messages.weights import Manifest, PullChunk, PullManifest
from rolloutbus.engine_worker.weights.relay_core import (
    MAX_PARKED,
    PARK_S,
    Asker,
    RelayAnswer,
    RelayCore,
    RelayEffect,
    SendChunk,
)

TENSORS = lay_out([("a", "U8", (100,)), ("b", "U8", (100,)), ("c", "U8", (0,))])
MANIFEST = Manifest("default", 3, "host", "segment", 228, TENSORS)
KEY = ("default", 3)
ASKER = Asker(Peer(b"child"), "1")
FIRST, SECOND = PullChunk("default", 3, 0, 100), PullChunk("default", 3, 128, 100)
BOTH = PullChunk("default", 3, 0, 228)


def code_of(effects: list[RelayEffect]) -> str:
    (effect,) = effects
    assert isinstance(effect, RelayAnswer)
    assert isinstance(effect.body, Problem)
    return effect.body.code


def chunk(ask: PullChunk) -> SendChunk:
    return SendChunk(ASKER, KEY, ask.offset, ask.size_bytes)


def test_a_chunk_is_served_once_the_tensors_in_it_are_proven() -> None:
    core = RelayCore()
    core.begin(MANIFEST)
    assert core.ask(ASKER, FIRST, 0.0) == []
    assert core.ask(ASKER, BOTH, 0.0) == []
    assert core.proven(KEY, [0]) == [chunk(FIRST)]
    assert core.ask(ASKER, FIRST, 0.0) == [chunk(FIRST)]
    assert core.proven(KEY, [1]) == [chunk(BOTH)]
    assert core.ask(ASKER, SECOND, 0.0) == [chunk(SECOND)]
    assert core.n_parked == 0


def test_a_version_that_begins_in_time_is_served_to_who_asked_before() -> None:
    core = RelayCore()
    assert core.ask(ASKER, PullManifest(*KEY), 0.0) == []
    assert core.ask(ASKER, FIRST, 0.0) == []
    assert core.begin(MANIFEST) == [RelayAnswer(ASKER, "manifest", MANIFEST)]
    assert core.proven(KEY, [0, 1]) == [chunk(FIRST)]


def test_a_version_that_never_comes_is_unavailable_in_the_end() -> None:
    core = RelayCore()
    core.ask(ASKER, FIRST, 1.0)
    assert core.tick(PARK_S) == []
    assert code_of(core.tick(1.0 + PARK_S)) == "version_unavailable"
    assert core.n_parked == 0


def test_bytes_that_are_late_are_asked_for_again() -> None:
    core = RelayCore()
    core.begin(MANIFEST)
    core.ask(ASKER, FIRST, 0.0)
    assert code_of(core.tick(PARK_S)) == "busy"
    core.ask(ASKER, FIRST, PARK_S)
    assert core.proven(KEY, [0]) == [chunk(FIRST)]


def test_nobody_waits_for_a_version_that_was_given_up() -> None:
    core = RelayCore()
    core.begin(MANIFEST)
    core.ask(ASKER, FIRST, 0.0)
    assert code_of(core.end(KEY)) == "version_unavailable"
    assert code_of(core.ask(ASKER, FIRST, 0.0)) == "version_unavailable"
    assert core.end(KEY) == []
    assert core.proven(KEY, [0]) == []


def test_nobody_waits_for_a_version_that_came_another_way_or_long_ago() -> None:
    core = RelayCore()
    core.ask(ASKER, FIRST, 0.0)
    assert code_of(core.end(KEY)) == "version_unavailable"
    older = PullChunk("default", 2, 0, 100)
    assert code_of(core.ask(ASKER, older, 0.0)) == "version_unavailable"
    newer = PullChunk("default", 4, 0, 100)
    assert core.ask(ASKER, newer, 0.0) == []


def test_a_version_that_comes_again_is_proven_anew() -> None:
    core = RelayCore()
    core.begin(MANIFEST)
    core.proven(KEY, [0, 1])
    core.begin(MANIFEST)
    assert core.ask(ASKER, FIRST, 0.0) == []


def test_so_many_questions_wait_and_no_more() -> None:
    core = RelayCore()
    for _ in range(MAX_PARKED):
        assert core.ask(ASKER, FIRST, 0.0) == []
    (refusal,) = core.ask(ASKER, FIRST, 0.0)
    assert isinstance(refusal, RelayAnswer)
    assert isinstance(refusal.body, Problem)
    assert refusal.body.code == "busy"
    assert refusal.body.retry_after_ms > 0
    assert core.n_parked == MAX_PARKED


def test_an_impossible_range_is_said_at_once() -> None:
    core = RelayCore()
    core.begin(MANIFEST)
    wrong = {
        PullChunk("default", 3, 0, 0): "bad_request",
        PullChunk("default", 3, 0, CHUNK_BYTES + 1): "bad_request",
        PullChunk("default", 3, 200, 29): "bad_request",
        PullChunk("default", 3, 0, 100, base=2): "unsupported",
    }
    assert {ask: code_of(core.ask(ASKER, ask, 0.0)) for ask in wrong} == wrong


def test_an_empty_tensor_needs_no_proof() -> None:
    core = RelayCore()
    empty = lay_out([("c", "U8", (0,)), ("a", "U8", (4,))])
    core.begin(msgspec.structs.replace(MANIFEST, tensors=empty, size_bytes=4))
    core.proven(KEY, [1])
    assert core.ask(ASKER, PullChunk("default", 3, 0, 4), 0.0) == [SendChunk(ASKER, KEY, 0, 4)]
