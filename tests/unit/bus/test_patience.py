from rolloutbus.bus.transport.ports import ANNOUNCE_AGAIN_S, Patience

ADDRESS = "tcp://10.0.0.1:7777"


def test_says_at_once_what_it_waits_for_and_again_every_ten_seconds() -> None:
    patience = Patience(ADDRESS, "a worker")
    said = [patience.failed("no-answer", now / 2) for now in range(41)]
    assert [index / 2 for index, each in enumerate(said) if each] == [0, ANNOUNCE_AGAIN_S, 20]
    assert said[0] == f"no router answers at {ADDRESS}; trying again"


def test_another_reason_is_told_at_once() -> None:
    patience = Patience(f"{ADDRESS}#{'a' * 64}", "a worker")
    assert patience.failed("no-answer", 1.0)
    assert "does not know this key" in patience.failed("unknown-key", 1.1)
    assert "not a worker's" in patience.failed("wrong-role", 1.2)
    assert "does not hold the router's key" in patience.failed("other-key", 1.3)


def test_what_is_lost_after_it_was_found_is_told_at_once() -> None:
    patience = Patience(ADDRESS, "a store")
    assert patience.failed("no-answer", 1.0)
    patience.joined()
    assert patience.failed("no-answer", 1.5)
