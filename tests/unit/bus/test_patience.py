from rolloutbus.bus.transport.ports import ANNOUNCE_AGAIN_S, Patience

ADDRESS = "tcp://10.0.0.1:7777"
KEYED = f"{ADDRESS}#{'a' * 64}"
OTHER = "tcp://10.0.0.2:7777"


def test_says_at_once_what_it_waits_for_and_again_every_ten_seconds() -> None:
    patience = Patience([ADDRESS], "a worker")
    said = [patience.failed("no-answer", ADDRESS, now / 2) for now in range(41)]
    assert [index / 2 for index, each in enumerate(said) if each] == [0, ANNOUNCE_AGAIN_S, 20]
    assert said[0] == f"no router answers at {ADDRESS}; trying again"


def test_another_reason_is_told_at_once() -> None:
    patience = Patience([KEYED], "a worker")
    assert patience.failed("no-answer", KEYED, 1.0)
    assert "host with `rolloutbus keys allow`" in patience.failed("unknown-key", KEYED, 1.1)
    assert "not a worker's" in patience.failed("wrong-role", KEYED, 1.2)
    keyless = patience.failed("no-key", ADDRESS, 1.2)
    assert "`--key FILE`, in a program `key_file=`" in keyless
    assert f"({ADDRESS}#KEY)" in keyless
    other = patience.failed("other-key", KEYED, 1.3)
    assert "does not hold the router's key" in other
    assert "bring its router.pub here" in other


def test_gives_up_when_keys_stay_wrong_for_too_long() -> None:
    patience = Patience([KEYED], "a worker", key_patience_s=60.0)
    patience.failed("unknown-key", KEYED, 1.0)
    patience.failed("no-answer", KEYED, 30.0)
    patience.failed("unknown-key", KEYED, 60.0)
    assert not patience.given_up
    patience.failed("no-answer", KEYED, 62.0)
    assert not patience.given_up, "a router that is away may come back with other keys"
    patience.failed("unknown-key", KEYED, 63.0)
    assert "it was revoked or never let in" in patience.given_up
    assert patience.given_up.endswith("given up after 60 s")


def test_who_has_joined_once_waits_for_ever() -> None:
    patience = Patience([KEYED], "a worker", key_patience_s=60.0)
    patience.failed("unknown-key", KEYED, 1.0)
    patience.joined(KEYED)
    patience.failed("unknown-key", KEYED, 100.0)
    patience.failed("unknown-key", KEYED, 1000.0)
    assert not patience.given_up


def test_what_is_lost_after_it_was_found_is_told_at_once() -> None:
    patience = Patience([ADDRESS], "a store")
    assert patience.failed("no-answer", ADDRESS, 1.0)
    assert not patience.joined(ADDRESS)
    assert patience.failed("no-answer", ADDRESS, 1.5)


def test_of_several_routers_it_says_once_of_each_which_is_tried_next() -> None:
    patience = Patience([KEYED, OTHER], "a worker")
    assert patience.failed("no-answer", KEYED, 1.0) == (
        f"no router answers at {ADDRESS}; trying {OTHER}"
    )
    assert patience.failed("no-answer", OTHER, 2.0) == (
        f"no router answers at {OTHER}; trying {ADDRESS}"
    )
    assert not patience.failed("no-answer", KEYED, 3.0)
    assert not patience.failed("no-answer", OTHER, 4.0)


def test_a_move_to_another_router_is_told_once() -> None:
    patience = Patience([KEYED, OTHER], "a worker")
    assert not patience.joined(KEYED)
    news = patience.joined(OTHER)
    assert news == f"the router is at {OTHER} now; before it was at {ADDRESS}"
    assert not patience.joined(OTHER)
