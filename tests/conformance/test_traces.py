"""Version 2: an entry may have a tenth element, its trace; every other entry is as in version 1."""

import pytest

from rolloutbus.bus.wire.codec import SIGNATURE, decode_batch, encode_batch
from rolloutbus.bus.wire.entry import Entry, TracedEntry, traced, untraced
from rolloutbus.bus.wire.errors import RemoteProtocolError
from tests.conformance import plain
from tests.conformance.representatives import NAMES

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ENTRY = NAMES["generate"]
WRONG = [
    "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
    f"01{TRACE[2:]}",
    TRACE.upper(),
    f"{TRACE}\n",
    f"{TRACE}-more",
    f"00-{'0' * 32}-00f067aa0ba902b7-01",
    f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
    "x" * 1_000_000,
    "\n",
    7,
    None,
]


def test_the_trace_is_the_tenth_element() -> None:
    frame = encode_batch([traced(ENTRY, TRACE)])

    (header,) = plain.read(frame[len(SIGNATURE) :])
    (before,) = plain.read(encode_batch([ENTRY])[len(SIGNATURE) :])
    assert header == [*before, TRACE]
    assert frame == SIGNATURE + plain.write([header])


def test_entries_with_and_without_a_trace_share_a_frame() -> None:
    entries = [ENTRY, traced(ENTRY, TRACE), Entry("resume", "c/1")]

    found = decode_batch(encode_batch(entries))

    assert [untraced(each) for each in found] == [ENTRY, ENTRY, entries[2]]
    assert [each.trace for each in found if isinstance(each, TracedEntry)] == ["", TRACE, ""]
    # Whoever passes them on without a trace writes what a peer of version 1 reads.
    assert encode_batch([untraced(each) for each in found]) == encode_batch(
        [ENTRY, ENTRY, entries[2]]
    )


def test_an_entry_without_a_trace_stays_as_short_as_it_was() -> None:
    (header,) = plain.read(encode_batch([ENTRY])[len(SIGNATURE) :])
    assert len(header) == 9
    assert type(decode_batch(encode_batch([ENTRY]))[0]) is Entry


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: repr(wrong)[:20])
def test_what_is_no_trace_is_malformed(wrong: object) -> None:
    (header,) = plain.read(encode_batch([traced(ENTRY, TRACE)])[len(SIGNATURE) :])
    with pytest.raises(RemoteProtocolError):
        decode_batch(SIGNATURE + plain.write([[*header[:9], wrong]]))


def test_an_eleventh_element_is_malformed() -> None:
    (header,) = plain.read(encode_batch([traced(ENTRY, TRACE)])[len(SIGNATURE) :])
    with pytest.raises(RemoteProtocolError):
        decode_batch(SIGNATURE + plain.write([[*header, 1]]))
