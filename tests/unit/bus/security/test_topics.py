"""Which streams a key may read."""

import pytest

from rolloutbus.bus.security.principals import Principal, Role, claim_of, granted
from rolloutbus.bus.wire.codec import topic_of

KEY = "ab" * 32


@pytest.mark.parametrize("role", ["client", "trainer"])
def test_who_samples_reads_under_its_own_names_only(role: Role) -> None:
    ann = Principal(KEY, "ann", role)
    assert granted(ann, claim_of("ann")) == topic_of("ann")
    assert granted(ann, claim_of("ann-7")) == topic_of("ann-7")
    for other in ("anna", "bob", ""):
        assert granted(ann, claim_of(other)) is None
    assert granted(Principal(KEY, "ann", role, actors=["x*"]), claim_of("ann")) is None


@pytest.mark.parametrize("role", ["client", "trainer", "worker", "store"])
def test_digests_and_everything_are_for_those_who_watch(role: Role) -> None:
    for asked in (b"", topic_of("ann"), topic_of("ann")[:3], b"client"):
        assert granted(Principal(KEY, "ann", role), asked) is None


@pytest.mark.parametrize("role", ["subscriber", "admin"])
def test_who_watches_reads_everything(role: Role) -> None:
    eve = Principal(KEY, "eve", role)
    for asked in (b"", topic_of("ann"), topic_of("ann")[:3]):
        assert granted(eve, asked) == asked
    assert granted(eve, claim_of("ann")) == topic_of("ann")


@pytest.mark.parametrize("name", ["a b", "ann@w0", "ann-\xff", "ann-" + "x" * 200, "ann-\0"])
def test_what_is_no_name_is_granted_to_nobody(name: str) -> None:
    for role in ("client", "admin"):
        assert granted(Principal(KEY, "ann", role), claim_of(name)) is None
