"""The table of a member's life is closed, and says who can lose what."""

from rolloutbus.bus.membership.lease import HOLDING, LINKED, MEMBER_LINK, UNLINKED_TRYING


def test_every_state_has_a_row_and_can_be_reached() -> None:
    reached = {after for row in MEMBER_LINK.values() for after in row.values()}
    assert reached == set(MEMBER_LINK)


def test_everybody_can_leave_and_nobody_comes_back() -> None:
    assert all(row["stopped"] == "left" for row in MEMBER_LINK.values())
    assert set(MEMBER_LINK["left"].values()) == {"left"}


def test_only_linked_states_lose_their_link_and_only_holders_their_lease() -> None:
    assert {state for state, row in MEMBER_LINK.items() if "link_lost" in row} == LINKED
    assert {state for state, row in MEMBER_LINK.items() if "lease_expired" in row} == HOLDING
    assert {state for state, row in MEMBER_LINK.items() if "connected" in row} == UNLINKED_TRYING
