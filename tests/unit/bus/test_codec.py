"""The codec: round trips, and refusals that name the field, whatever the bytes are."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutbus.bus.wire.codec import (
    PROTOCOL_VERSION,
    SIGNATURE,
    decode_batch,
    encode_batch,
    pack,
    topic_of,
    unpack,
    unpack_as,
    unpack_fleet,
    unpack_result,
)
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.errors import LocalProtocolError, RemoteProtocolError
from rolloutbus.bus.wire.limits import MAX_DEADLINE_MS
from rolloutbus.bus.wire.messages.endings import Accepted
from rolloutbus.bus.wire.messages.generation import Generate, SamplingParams
from rolloutbus.bus.wire.messages.membership import Heartbeat, Hello
from tests.conformance import plain
from tests.conformance.representatives import NAMES

texts = st.text(max_size=40)
uint64s = st.integers(0, 2**64 - 1)
attempts = st.tuples(uint64s, uint64s)
floats = st.floats(allow_nan=False)
bodies = st.one_of(
    st.builds(Accepted, st.lists(st.tuples(texts, attempts), max_size=4)),
    st.builds(
        Generate,
        prompt=st.binary(max_size=200),
        sampling=st.builds(
            SamplingParams,
            max_new_tokens=uint64s,
            temperature=floats,
            top_p=floats,
            sampling_seed=st.none() | st.integers(-(2**63), 2**64 - 1),
            stop_token_ids=st.lists(uint64s, max_size=4),
            ignore_eos=st.booleans(),
        ),
        stream=st.booleans(),
    ),
    st.builds(
        Heartbeat, seq=uint64s, running=st.lists(st.tuples(texts, attempts, texts), max_size=4)
    ),
)
KINDS_OF_BODIES: dict[type, str] = {Accepted: "accepted", Generate: "generate", Heartbeat: "beat"}
placements = st.builds(
    Placement,
    *(texts, texts, texts, texts, uint64s, st.integers(-100, 100)),
    resend=st.booleans(),
)


@st.composite
def entries(draw: st.DrawFn) -> tuple[Entry, msgspec.Struct]:
    body = draw(bodies)
    entry = Entry(
        kind=KINDS_OF_BODIES[type(body)],
        rid=draw(texts),
        attempt=draw(attempts),
        epoch=draw(texts),
        route=draw(texts),
        deadline_ms=draw(st.integers(-(2**63), MAX_DEADLINE_MS)),
        place=draw(st.none() | placements),
        body=pack(body),
        detached=draw(st.booleans()),
    )
    return entry, body


@settings(max_examples=200, deadline=None)
@given(st.lists(entries(), max_size=4))
def test_what_is_encoded_is_what_is_decoded(pairs: list[tuple[Entry, msgspec.Struct]]) -> None:
    frame = encode_batch([entry for entry, _ in pairs])
    decoded = decode_batch(frame)
    assert encode_batch(decoded) == frame
    assert decoded == [entry for entry, _ in pairs]
    assert [unpack(entry) for entry in decoded] == [body for _, body in pairs]


def test_frame_may_be_a_memoryview() -> None:
    frame = encode_batch([NAMES["beat"]])
    assert decode_batch(memoryview(frame)) == decode_batch(frame) == [NAMES["beat"]]


@pytest.mark.parametrize("frame", [b"", b"R", b"rb\x01\x90", b"\x90", b"GET / HTTP/1.1\r\n"])
def test_frame_without_the_signature_is_refused(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="signature"):
        decode_batch(frame)


def test_frame_of_another_version_is_refused_as_such() -> None:
    with pytest.raises(RemoteProtocolError, match="version"):
        decode_batch(b"RB" + bytes([PROTOCOL_VERSION + 1]) + b"\x90")


def test_bytes_after_the_batch_are_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="trailing"):
        decode_batch(encode_batch([NAMES["beat"]]) + b"\x00")


@pytest.mark.parametrize("n_kept", [3, 4, 9])
def test_cut_frame_is_refused(n_kept: int) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed batch"):
        decode_batch(encode_batch([NAMES["beat"]])[:n_kept])


BAD_BATCHES: list[Any] = [
    {},
    [1],
    [[]],
    [[1]],
    [["beat", 5]],
    [["beat", "", [1]]],
    [["beat", "", [1, 2, 3]]],
    [["beat", "", [0, 0], "", "", "soon"]],
    [["generate", "", [0, 0], "", "", 0, []]],
    [["generate", "", [0, 0], "", "", 0, ["p", "any", "", "", 0, 0, False, "more"]]],
    [["beat", "", [0, 0], "", "", 0, None, {}, False, "more"]],
]


@pytest.mark.parametrize("batch", BAD_BATCHES)
def test_header_of_wrong_shape_is_refused(batch: object) -> None:
    with pytest.raises(RemoteProtocolError, match="malformed batch"):
        decode_batch(SIGNATURE + plain.write(batch))


def _with_body(kind: str, body: object) -> Entry:
    return Entry(kind, body=msgspec.Raw(plain.write(body)))


@pytest.mark.parametrize("kind", ["", "GENERATE", "finished", "cancelled", "x" * 1000])
def test_unknown_kind_is_refused_without_echoing_all_of_it(kind: str) -> None:
    with pytest.raises(RemoteProtocolError, match="unknown message kind") as caught:
        unpack(Entry(kind))
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize(
    ("kind", "body", "named"),
    [
        ("lease", {"router_epoch": 1, "instance": "x", "seq": 1, "extra": 0}, "extra"),
        ("lease", {"router_epoch": 1, "instance": "x"}, "seq"),
        ("lease", {"router_epoch": 1, "instance": "x", "seq": "1"}, r"\$\.seq"),
        ("lease", {"router_epoch": 1, "instance": "x", "seq": 1.5}, r"\$\.seq"),
        ("lease", {"router_epoch": True, "instance": "x", "seq": 1}, r"\$\.router_epoch"),
        ("lease", [1, "x", 1], "object"),
        ("pause", {"mode": "stop"}, r"\$\.mode"),
        ("generate", {"prompt": "text", "sampling": {}}, r"\$\.prompt"),
        ("generate", {"prompt": b"", "sampling": {"top_q": 1}}, r"top_q.*\$\.sampling"),
        ("generate", {"prompt": b"", "sampling": {"top_p": "1"}}, r"\$\.sampling\.top_p"),
        ("accepted", {"items": [["a", [1]]]}, r"\$\.items\[0\]\[1\]"),
        ("failed", {"code": "c", "message": "m", "outcome": "maybe"}, r"\$\.outcome"),
        (
            "manifest",
            {"policy": "p", "version": 1, "host": "h", "segment": "s", "size_bytes": 1}
            | {"tensors": [["n", "F32", [1], 0, 4, 0, "more"]]},
            r"\$\.tensors",
        ),
    ],
)
def test_refusal_of_a_body_names_kind_and_field(kind: str, body: object, named: str) -> None:
    with pytest.raises(RemoteProtocolError, match=named) as caught:
        unpack(_with_body(kind, body))
    assert str(caught.value).startswith(f"{kind}:")


def test_refusal_of_a_result_names_the_field() -> None:
    with pytest.raises(RemoteProtocolError, match="n_aborted"):
        unpack_result("abort", _with_body("finished", {}))


def test_refusal_of_a_fleet_outcome_names_the_field() -> None:
    body = {"results": [{"worker": "w0", "kind": "finished"}], "silent": []}
    with pytest.raises(RemoteProtocolError, match=r"body.*results"):
        unpack_fleet(_with_body("finished", body))


def test_result_of_what_is_no_command_is_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError, match="'beat'"):
        unpack_result("beat", Entry("finished"))


def test_topics_have_one_width_and_differ() -> None:
    topics = {topic_of(name) for name in ("", "a", "ab", "trainer", "trainer-1")}
    assert {len(topic) for topic in topics} == {16}
    assert len(topics) == 5


def test_deeply_nested_body_is_refused() -> None:
    depth = 100_000
    with pytest.raises(RemoteProtocolError):
        decode_batch(SIGNATURE + b"\x91\x98" + b"\xa4beat" + b"\x91" * depth + b"\x90")
    nested: Any = SIGNATURE + b"\x91\x98\xa4beat\xa0\x92\x00\x00\xa0\xa0\x00\xc0" + b"\x91" * depth
    with pytest.raises(RemoteProtocolError):
        decode_batch(nested + b"\x90")


def test_a_body_is_never_taken_for_one_of_another_kind() -> None:
    entry = NAMES["beat"]
    assert unpack_as(Heartbeat, entry) == unpack(entry)
    with pytest.raises(LocalProtocolError, match="a 'beat' holds a Heartbeat, not a Hello"):
        unpack_as(Hello, entry)
