"""Which detached requests of a killed client must be found again, and which may be lost."""

import msgspec
import pytest

from tests.drills.chaos.history import Life, lives_of
from tests.drills.chaos.inheritance import note_owed
from tests.drills.chaos.records import Invoked, Looked, Progressed
from tests.drills.chaos.recovery import Struck

ASKED = Invoked("c9:0.0:1", 10.0, b"", seed=3, n_tokens=4, allowed=[], is_detached=True)
KILLED = Struck("kill_client", "mortals", 15.0, 15.0)
LOOKED = Looked("c9", 16.0, 1)


def _life(asked: Invoked = ASKED) -> Life:
    return lives_of([asked], is_excused=True)[asked.op]


def _is_owed(life: Life, *struck: Struck, looks: tuple[Looked, ...] = (LOOKED,)) -> bool:
    note_owed([life], looks, [KILLED, *struck])
    return life.is_owed


def test_what_nothing_has_endangered_is_owed() -> None:
    assert _is_owed(_life())


@pytest.mark.parametrize("kind", ["kill_router", "stop_router", "kill_worker"])
def test_whoever_held_it_may_take_it_along(kind: str) -> None:
    blow = msgspec.convert({"kind": kind, "victim": "x", "at": 15.5, "until": 15.9}, Struck)
    assert not _is_owed(_life(), blow)
    assert _is_owed(_life(), Struck(blow.kind, "x", 40.0, 41.0))


def test_nobody_looked_for_it() -> None:
    assert not _is_owed(_life(), looks=())
    assert not _is_owed(_life(), looks=(Looked("c8", 16.0, 1),))


def test_one_that_may_not_have_been_heard_is_not_owed_unless_it_has_begun() -> None:
    late = msgspec.structs.replace(ASKED, at=14.9)
    life = _life(late)
    assert not _is_owed(life)
    life.progressed.append(Progressed(late.op, 14.95, "w0", 1))
    assert _is_owed(life)


def test_others_end_with_their_client() -> None:
    assert not _is_owed(_life(msgspec.structs.replace(ASKED, is_detached=False)))
