"""Invitations: good once, for one key, until a time; tokens are read whole or not at all."""

import msgspec
import pytest

from rolloutbus.bus.security.invites import (
    REMEMBERED_S,
    Invite,
    KeyList,
    Token,
    enrolled,
    read_token,
    text_of,
    with_invite,
    without_old,
)
from rolloutbus.bus.security.key_files import AllowList, edit_key_list
from rolloutbus.bus.security.principals import Principal, answer, handed, principals_in
from rolloutbus.bus.wire.errors import Refused, SettingsError

NOW_S = 1_000_000.0
KEYS = [f"{n:064x}" for n in range(1, 9)]
ANN = Principal(KEYS[0], "ann", "client")
INVITE = Invite(KEYS[1], int(NOW_S) + 60, "host-b", "worker", priorities=(0, 3))
LISTED = KeyList([ANN], [INVITE])
TOKEN = Token(
    b"\7" * 32, b"\10" * 32, 2_000_000_000, "host-b", "worker", "tcp://a:7777", "tcp://a:7778"
)


def code_of(listed: KeyList, invite: str, key: str, now_s: float = NOW_S) -> str:
    with pytest.raises(Refused) as caught:
        enrolled(listed, invite, key, now_s)
    assert caught.value.outcome == "not_started"
    return caught.value.code


def test_an_invitation_lets_one_key_in_with_its_rights() -> None:
    after = enrolled(LISTED, INVITE.key, KEYS[2], NOW_S)
    assert after.principals == [ANN, Principal(KEYS[2], "host-b", "worker", priorities=(0, 3))]
    assert code_of(after, INVITE.key, KEYS[3]) == "invite_used"


def test_the_same_key_may_ask_again_also_when_the_time_is_over() -> None:
    after = enrolled(LISTED, INVITE.key, KEYS[2], NOW_S)
    assert enrolled(after, INVITE.key, KEYS[2], NOW_S + 999) == after


def test_an_invitation_ends_at_its_time() -> None:
    assert code_of(LISTED, INVITE.key, KEYS[2], float(INVITE.expires_at)) == "invite_expired"


def test_an_unknown_invitation_lets_nobody_in() -> None:
    assert code_of(LISTED, KEYS[5], KEYS[2]) == "invite_unknown"


@pytest.mark.parametrize("key", ["", "x" * 64, KEYS[2].upper() + "A", ANN.key])
def test_what_is_no_new_key_is_refused(key: str) -> None:
    assert code_of(LISTED, INVITE.key, key) == "bad_request"


def test_a_name_that_has_a_key_is_not_invited_and_an_open_invitation_is_replaced() -> None:
    other = msgspec.structs.replace(INVITE, key=KEYS[4])
    assert with_invite(LISTED, other).invites == [other]
    with pytest.raises(SettingsError, match="revoke it first"):
        with_invite(LISTED, msgspec.structs.replace(INVITE, name="ann"))
    with pytest.raises(SettingsError, match="could both be called"):
        with_invite(LISTED, msgspec.structs.replace(INVITE, name="bob", actors=["ann"]))


def test_what_became_of_an_invitation_is_remembered_for_a_week() -> None:
    assert without_old([INVITE], INVITE.expires_at + REMEMBERED_S - 1.0) == [INVITE]
    assert without_old([INVITE], INVITE.expires_at + REMEMBERED_S + 1.0) == []


def test_a_newcomer_passes_the_doors_of_routers_only(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("keys") / "allow.json"
    edit_key_list(path, lambda _: LISTED)
    principals = AllowList(path).principals
    assert principals[INVITE.key].role == "newcomer"
    for door, is_open in (
        ("frontend", True),
        ("backend", True),
        ("stream", False),
        ("bulk", False),
    ):
        question = [
            *(b"", b"1.0", b"1", door.encode(), b"10.0.0.1", b"", b"CURVE"),
            bytes.fromhex(INVITE.key),
        ]
        assert (answer(question, principals)[3] == b"200") is is_open


def test_members_are_handed_all_keys_and_no_invitation(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("keys") / "allow.json"
    edit_key_list(path, lambda _: LISTED)
    keys = handed(AllowList(path).principals.values())
    assert principals_in(keys) == {ANN.key: ANN}
    assert keys.stamp != handed([]).stamp


def test_a_list_that_makes_no_sense_is_not_taken() -> None:
    keys = handed([ANN])
    nonsense = msgspec.structs.replace(keys.keys[0], role="king")
    with pytest.raises(SettingsError, match="handed over"):
        principals_in(msgspec.structs.replace(keys, keys=[nonsense]))
    twice = msgspec.structs.replace(keys, keys=[keys.keys[0], keys.keys[0]])
    with pytest.raises(SettingsError, match="same key"):
        principals_in(twice)


def test_a_token_says_what_it_was_made_of_and_shows_no_secret() -> None:
    assert read_token(f" {TOKEN.text()}\n") == TOKEN
    assert TOKEN.address == TOKEN.backend
    assert "\\x07" not in repr(TOKEN)


def test_a_token_that_was_not_copied_whole_is_refused_and_not_repeated() -> None:
    text = TOKEN.text()
    wrong = ["", "rolloutbus-", text[:-1], text[1:], text + "A", text.replace("A", "B", 1)]
    wrong += [text[:20] + "!" + text[21:], "x" * 5000, text * 2, text.upper()]
    for each in wrong:
        with pytest.raises(Refused) as caught:
            read_token(each)
        assert caught.value.code == "invite_malformed"
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["../id_rsa", "a/b", ".ssh", "router", "", "two words", "x" * 65])
def test_a_token_names_no_file_but_its_own(name: str) -> None:
    with pytest.raises(SettingsError, match=r"invited|no name"):
        msgspec.structs.replace(TOKEN, name=name)
    # Made by somebody who does not check it.
    content = msgspec.msgpack.decode(msgspec.msgpack.encode(TOKEN))
    content[3] = name
    with pytest.raises(SettingsError, match=r"invited|no name"):
        read_token(text_of(msgspec.msgpack.encode(content)))
