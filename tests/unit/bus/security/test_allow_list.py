"""The allow-list: what it may say, who may write it, and how a change is seen."""

from pathlib import Path

import pytest

from rolloutbus.bus.security.key_files import AllowList, edit_allow_list, read_allow_list
from rolloutbus.bus.security.principals import Principal, by_key
from rolloutbus.bus.wire.errors import SettingsError

KEYS = [f"{n:064x}" for n in range(10)]
ANN = Principal(KEYS[0], "ann", "client")
BOB = Principal(KEYS[1], "bob", "trainer", actors=["bob", "carol"], sessions=["s-*"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "allow.json"


def test_list_says_what_was_written(path: Path) -> None:
    edit_allow_list(path, lambda known: [*known, ANN])
    edit_allow_list(path, lambda known: [*known, BOB])
    assert read_allow_list(path) == [ANN, BOB]
    assert AllowList(path).principals == {ANN.key: ANN, BOB.key: BOB}


def test_change_is_seen_once(path: Path) -> None:
    edit_allow_list(path, lambda _: [ANN, BOB])
    held = AllowList(path)
    assert not held.refresh()
    edit_allow_list(path, lambda _: [BOB])
    assert held.refresh()
    assert held.principals == {BOB.key: BOB}
    assert not held.refresh()


def test_an_edit_that_changes_nothing_writes_nothing(path: Path) -> None:
    edit_allow_list(path, lambda _: [ANN])
    before = path.stat()
    edit_allow_list(path, lambda known: known)
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_broken_list_leaves_the_last_good_one_in_force_and_says_why(path: Path) -> None:
    edit_allow_list(path, lambda _: [ANN])
    held = AllowList(path)
    path.write_text("{")
    assert not held.refresh()
    assert held.principals == {ANN.key: ANN}
    assert str(path) in held.problem
    edit_again = [BOB]
    path.unlink()
    assert not held.refresh()
    edit_allow_list(path, lambda _: edit_again)
    assert held.refresh()
    assert held.problem == ""


def test_edit_that_makes_no_sense_changes_nothing(path: Path) -> None:
    edit_allow_list(path, lambda _: [ANN])
    before = path.read_bytes()
    with pytest.raises(SettingsError, match="same key"):
        edit_allow_list(path, lambda known: [*known, Principal(ANN.key, "eve", "admin")])
    assert path.read_bytes() == before
    assert sorted(each.name for each in path.parent.iterdir()) == [".allow.json.lock", "allow.json"]


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_list_that_others_may_write_is_refused(path: Path, mode: int) -> None:
    edit_allow_list(path, lambda _: [ANN])
    path.chmod(mode)
    with pytest.raises(SettingsError, match="write it"):
        AllowList(path)


@pytest.mark.parametrize(
    "content",
    [
        '{"principals": [{"key": "short", "name": "ann", "role": "client"}]}',
        f'{{"principals": [{{"key": "{KEYS[0]}", "name": "ann", "role": "god"}}]}}',
        f'{{"principals": [{{"key": "{KEYS[0]}", "name": "a b", "role": "client"}}]}}',
        f'{{"principals": [{{"key": "{KEYS[0]}", "name": "ann", "rolle": "client"}}]}}',
        "[]",
        "",
    ],
)
def test_nonsense_is_refused_with_one_line(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(SettingsError) as caught:
        AllowList(path)
    assert "\n" not in str(caught.value)


def test_two_principals_cannot_claim_one_name() -> None:
    wide = Principal(KEYS[2], "dan", "client", actors=["an*"])
    for rivals in ([ANN, wide], [wide, ANN], [ANN, Principal(KEYS[3], "ann-2", "client")]):
        with pytest.raises(SettingsError, match="could both be called"):
            by_key(rivals)


def test_two_keys_of_one_principal_may_share_its_names() -> None:
    assert len(by_key([ANN, Principal(KEYS[4], "ann", "client")])) == 2


def test_principal_takes_its_own_names_and_sessions_only() -> None:
    assert ANN.may_be("ann")
    assert ANN.may_be("ann-7")
    assert not ANN.may_be("anna")
    assert ANN.may_use("anything")
    assert BOB.may_be("carol")
    assert not BOB.may_be("bob-1")
    assert BOB.may_use("s-1")
    assert not BOB.may_use("t-1")
