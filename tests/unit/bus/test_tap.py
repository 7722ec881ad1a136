"""A topic of a tap says what it was made of."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutbus.bus.streams.tap import TapEvent, TapMark, mark_in
from rolloutbus.bus.wire.errors import RemoteProtocolError

EVENTS: list[TapEvent] = ["received", "sent", "undelivered", "malformed", "revoked", "tick"]
NUMBERS = st.integers(0, 2**64 - 1)


@settings(deadline=None)
@given(
    st.builds(
        TapMark,
        st.sampled_from(EVENTS),
        NUMBERS,
        st.floats(allow_nan=False),
        NUMBERS,
        st.text(max_size=64),
    )
)
def test_a_mark_comes_back_from_its_topic(mark: TapMark) -> None:
    assert mark_in(mark.topic) == mark


@pytest.mark.parametrize("topic", [b"", b">" * 24, b"=" * 25, b">" * 25 + b"\xff"])
def test_what_is_no_topic_of_a_tap_is_refused(topic: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        mark_in(topic)
