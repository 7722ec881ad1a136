"""No bytes of a peer make a reader raise anything but a protocol error; `frames.py` does millions.

More examples: `FUZZ_EXAMPLES=5000 pytest tests/fuzz/test_frames.py` takes about two minutes.
"""

import os
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, target
from hypothesis import strategies as st

from rolloutbus.bus.wire.codec import MAX_BATCH_BYTES, SIGNATURE, decode_batch, encode_batch
from rolloutbus.bus.wire.commands import KINDS, RESULTS
from rolloutbus.bus.wire.entry import Entry
from rolloutbus.bus.wire.limits import MAX_BATCH_ENTRIES
from tests.conformance.representatives import NAMES
from tests.fuzz.frames import fuzz
from tests.fuzz.mutations import NASTY
from tests.fuzz.readers import Readers

# Only a hang may end these: how long so many examples take is the machine's business.
pytestmark = pytest.mark.timeout(1200)

N_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "200"))
"""`make test` asks for more."""
N_FRAMES = 30 * N_EXAMPLES

BODIES = {
    name: msgspec.msgpack.decode(entry.body)
    for name, entry in NAMES.items()
    if name.removeprefix("finished.") in {*KINDS, *RESULTS}
}


def nasty(at: int) -> Any:  # noqa: ANN401 - anything
    """By its number: hypothesis would print the whole list again and again."""
    return NASTY[at]


values = st.recursive(
    st.integers(0, len(NASTY) - 1).map(nasty)
    | st.integers(-(2**63), 2**64 - 1)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A body with some of its fields replaced, left out or made up."""
    name = draw(st.sampled_from(sorted(BODIES)))
    body = dict(BODIES[name])
    for field in draw(st.lists(st.sampled_from([*body, "extra"]), max_size=3, unique=True)):
        if draw(st.booleans()) or field not in body:
            body[field] = draw(values)
        else:
            del body[field]
    return name, body


@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(bodies())
async def test_a_body_is_refused_or_can_be_passed_on(named: tuple[str, dict[str, Any]]) -> None:
    name, body = named
    readers = Readers()
    entry = Entry(name.partition(".")[0], "a/1", body=msgspec.Raw(msgspec.msgpack.encode(body)))
    readers.entry(entry)
    assert readers.crashes == []
    target(float(sum(readers.n_understood.values())))


@settings(max_examples=N_EXAMPLES, deadline=None)
@given(st.lists(values, max_size=9), st.integers(0, 40), st.binary(max_size=9))
async def test_a_frame_is_refused_or_read(header: list[Any], at: int, junk: bytes) -> None:
    frame = bytearray(msgspec.msgpack.encode([header]))
    frame[at:at] = junk
    readers = Readers()
    readers.frame(SIGNATURE + bytes(frame))
    readers.frame(bytes(frame))
    readers.host_frame(SIGNATURE + bytes(frame))
    assert readers.crashes == []


async def test_mutated_frames_crash_no_reader(seed: int) -> None:
    found = await fuzz(N_FRAMES, seed)
    assert found["first_crashes"] == []
    # Both ways were taken often, or the mutations are too tame or too wild to tell anything.
    assert N_FRAMES * 0.05 < int(str(found["understood"])) < N_FRAMES * 0.9


def test_claimed_sizes_allocate_nothing() -> None:
    """Four bytes that stand for four billion items are refused where they are read."""
    readers = Readers()
    head = SIGNATURE + b"\x91\x98\xa6queued\xa0\x92\x00\x00\xa0\xa0\x00\xc0\x81\xa4rids"
    for claim in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        assert not readers.frame(SIGNATURE + claim)
        assert not readers.frame(head + claim)
    tiny = msgspec.msgpack.encode({"rids": [""] * 100_001})
    readers.body(Entry("queued", body=msgspec.Raw(tiny)))
    assert readers.n_understood["bodies"] == 0
    assert readers.crashes == []


def test_batches_beyond_the_limits_are_refused() -> None:
    entry = NAMES["beat"]
    assert len(decode_batch(encode_batch([entry] * MAX_BATCH_ENTRIES))) == MAX_BATCH_ENTRIES
    readers = Readers()
    assert not readers.frame(encode_batch([entry] * (MAX_BATCH_ENTRIES + 1)))
    large = Entry("beat", body=msgspec.Raw(msgspec.msgpack.encode(bytes(MAX_BATCH_BYTES))))
    assert not readers.frame(encode_batch([large]))
    assert readers.n_refused == 2
