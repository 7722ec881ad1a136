"""What each role may say: who samples may also read texts, who trains may change engines."""

import pytest

from rolloutbus.bus.security.principals import KINDS_OF, ROLES
from rolloutbus.bus.wire.commands import COMMANDS

CHANGES = ("load_lora", "unload_lora", "save_weights", "start_profile", "stop_profile")


@pytest.mark.parametrize("kind", ["generate", "score", "embed", "rerank", "server_info"])
def test_a_client_may_have_texts_continued_and_read_and_learn_facts(kind: str) -> None:
    assert {role for role in ROLES if kind in KINDS_OF[role]} == {"client", "trainer", "admin"}


@pytest.mark.parametrize("kind", [*CHANGES, "get_load"])
def test_only_who_trains_may_change_what_an_engine_holds_or_writes(kind: str) -> None:
    assert {role for role in ROLES if kind in KINDS_OF[role]} == {"trainer", "admin"}


def test_every_kind_that_a_client_may_send_beside_its_presence_is_a_command_or_an_ack() -> None:
    presence = KINDS_OF["subscriber"] - {"status"}
    assert KINDS_OF["client"] - presence <= COMMANDS.keys() | {"ack"}
