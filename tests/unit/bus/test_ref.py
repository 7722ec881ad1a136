"""A ref carries typed commands to its address, each with a deadline, and checks the answer."""

import math
from collections.abc import AsyncGenerator

import msgspec
import pytest

from rolloutbus.bus.actor.ref import FLEET, STORE, ActorRef, Command, worker
from rolloutbus.bus.wire.commands import COMMAND_OF, COMMANDS, KINDS
from rolloutbus.bus.wire.errors import LocalProtocolError, Refused, RemoteProtocolError
from rolloutbus.bus.wire.messages.control import FleetStatus, Pause, Status
from rolloutbus.bus.wire.messages.endings import Done, Problem
from rolloutbus.bus.wire.messages.generation import Generate, SamplingParams

PROMPT = b"\x01\0\0\0"


class Notebook:
    """A messenger that notes what it is given and answers `Done`."""

    def __init__(self) -> None:
        self.told: list[tuple[Command, float]] = []

    def tell(self, command: Command, deadline_s: float) -> None:
        self.told.append((command, deadline_s))

    async def ask(self, command: Command, deadline_s: float) -> msgspec.Struct:
        self.told.append((command, deadline_s))
        return Done()

    async def stream(self, command: Command, deadline_s: float) -> AsyncGenerator[int]:
        self.told.append((command, deadline_s))
        for token in (1, 2):
            yield token


def _ref(address: str = FLEET) -> tuple[ActorRef[msgspec.Struct, int], Notebook]:
    notebook = Notebook()
    return ActorRef(address, notebook), notebook


@pytest.mark.parametrize("address", ["", FLEET, STORE, worker("w0")])
async def test_what_is_told_and_asked_goes_to_its_address(address: str) -> None:
    ref, notebook = _ref(address)
    ref.tell(Pause("drain"), deadline_s=2.0)
    assert await ref.ask(Status(), deadline_s=3.0) == Done()
    assert notebook.told == [
        (Command("pause", Pause("drain"), address), 2.0),
        (Command("status", Status(), address), 3.0),
    ]


async def test_a_stream_brings_deltas_in_order() -> None:
    ref, _ = _ref("")
    deltas = ref.stream(Generate(prompt=PROMPT, sampling=SamplingParams()), deadline_s=1.0)
    assert [delta async for delta in deltas] == [1, 2]


async def test_an_answer_of_another_type_is_an_error() -> None:
    ref, _ = _ref()
    assert await ref.ask_for(Done, Pause(), deadline_s=1.0) == Done()
    with pytest.raises(RemoteProtocolError, match="Status was answered with Done"):
        await ref.ask_for(FleetStatus, Status(), deadline_s=1.0)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, math.nan, math.inf])
def test_a_deadline_that_is_none_is_refused(deadline_s: float) -> None:
    ref, notebook = _ref()
    with pytest.raises(Refused) as caught:
        ref.tell(Pause(), deadline_s=deadline_s)
    assert caught.value.field == "deadline_s"
    assert not notebook.told


def test_only_commands_can_be_told() -> None:
    ref, _ = _ref()
    with pytest.raises(LocalProtocolError, match="Problem is no command"):
        ref.tell(Problem("internal", "no", "failed"), deadline_s=1.0)


def test_every_command_is_known_by_its_body() -> None:
    assert {COMMAND_OF[KINDS[kind]] for kind in COMMANDS} == COMMANDS.keys()
