"""Headers that choose how a request is sampled, beside its body."""

import pytest
from fastapi import Request

from rolloutbus.bus.wire.errors import Refused
from rolloutbus.gateway.exchange import Json
from rolloutbus.gateway.headers import with_headers

SESSION = (b"x-session-id", b"s1")


def read(body: Json, *headers: tuple[bytes, bytes]) -> Json:
    return with_headers(Request({"type": "http", "headers": [*headers]}), body)


def test_headers_say_what_the_body_leaves_out() -> None:
    versions = (b"x-smg-version-policy", b"min-version:3")
    asked = read({"model": "m"}, SESSION, (b"x-deadline-ms", b"1500"), versions)
    said = {"session_id": "s1", "timeout": 1.5, "versions": "min:3"}
    assert asked == {"model": "m"} | said


def test_who_says_the_same_twice_is_understood() -> None:
    key = (b"x-smg-routing-key", b"s1")
    assert read({"session_id": "s1"}, SESSION, SESSION, key) == {"session_id": "s1"}


@pytest.mark.parametrize(
    ("body", "other", "who"),
    [
        ({"session_id": "s2"}, (b"accept", b"*/*"), "the header x-session-id and the body"),
        (
            {},
            (b"x-smg-routing-key", b"s2"),
            "the header x-smg-routing-key and the header x-session-id",
        ),
        ({}, (b"x-session-id", b"s2"), "the header x-session-id and the header x-session-id"),
    ],
)
def test_two_that_differ_are_both_named(body: Json, other: tuple[bytes, bytes], who: str) -> None:
    with pytest.raises(Refused, match=f"{who} say different things; leave one out") as refused:
        read(body, SESSION, other)
    assert refused.value.field == "session_id"


@pytest.mark.parametrize("wrong", [{"session_id": 1}, {"timeout": True}, {"versions": ["any"]}])
def test_what_has_a_wrong_type_in_the_body_is_left_to_its_reader(wrong: Json) -> None:
    headers = [(b"x-session-id", b"1"), (b"x-deadline-ms", b"1000")]
    read_body = read(wrong, *headers, (b"x-smg-version-policy", b"any"))
    assert {name: read_body[name] for name in wrong} == wrong
    assert type(read_body["timeout"]) is type(wrong.get("timeout", 1.0))
