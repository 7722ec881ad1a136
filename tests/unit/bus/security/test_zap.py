"""The door's answer: yes to who plainly may, no to anything else, and never an exception."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutbus.bus.security.principals import (
    ALLOWED,
    MISPLACED,
    REFUSED,
    ROLES,
    ROLES_AT,
    Principal,
    answer,
)

KEY = bytes(range(32))
PROBE = bytes(range(1, 33))
STATUS = 3
USER_ID = 5


def question(key: bytes, domain: bytes = b"frontend", mechanism: bytes = b"CURVE") -> list[bytes]:
    return [b"", b"1.0", b"1", domain, b"127.0.0.1", b"", mechanism, key]


def known(role: str = "client") -> dict[str, Principal]:
    return {KEY.hex(): Principal(KEY.hex(), "ann", role)}  # type: ignore[arg-type]


def test_known_key_comes_in_under_its_own_name() -> None:
    reply = answer(question(KEY), known())
    assert reply == [b"", b"1.0", b"1", ALLOWED, b"OK", KEY.hex().encode(), b""]


def test_unknown_key_stays_out() -> None:
    reply = answer(question(PROBE), known())
    assert (reply[STATUS], reply[USER_ID]) == (REFUSED, b"")


@pytest.mark.parametrize("door", ROLES_AT)
@pytest.mark.parametrize("role", ROLES)
def test_role_opens_its_own_doors_only(role: str, door: str) -> None:
    reply = answer(question(KEY, door.encode()), known(role))
    assert reply[STATUS] == (ALLOWED if role in ROLES_AT[door] else MISPLACED)
    assert bool(reply[USER_ID]) == (role in ROLES_AT[door])


@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN", b"GSSAPI", b""])
def test_other_mechanisms_stay_out(mechanism: bytes) -> None:
    assert answer(question(KEY, mechanism=mechanism), known())[STATUS] == REFUSED


def test_unknown_door_stays_shut() -> None:
    assert answer(question(KEY, b"elsewhere"), known("admin"))[STATUS] == REFUSED


def test_probe_passes_every_door_and_is_nobody() -> None:
    for door in ROLES_AT:
        assert answer(question(PROBE, door.encode()), {}, {PROBE.hex()})[STATUS] == ALLOWED


@given(st.lists(st.binary(max_size=64), max_size=12))
def test_garbage_is_refused_with_a_whole_answer(frames: list[bytes]) -> None:
    reply = answer(frames, known())
    assert len(reply) == 7
    assert reply[STATUS] == REFUSED


@given(st.integers(0, 7), st.binary(max_size=40))
def test_whatever_one_frame_is_replaced_by_lets_nobody_else_in(index: int, frame: bytes) -> None:
    frames = question(KEY)
    frames[index] = frame
    reply = answer(frames, known())
    # Request id, address and routing id are not for us to judge.
    if frame != question(KEY)[index] and index not in (2, 4, 5):
        assert reply[STATUS] == REFUSED
    assert reply[USER_ID] in (b"", KEY.hex().encode())
