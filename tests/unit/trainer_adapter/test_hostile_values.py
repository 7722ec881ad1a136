"""A value of a wrong type ends its own call, whatever command and field it stands in."""

import enum
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutbus.bus.wire.codec import unpack
from rolloutbus.bus.wire.commands import COMMANDS
from rolloutbus.bus.wire.entry import Entry, Placement
from rolloutbus.bus.wire.errors import Refused
from rolloutbus.bus.wire.messages.generation import Generate, SamplingParams
from rolloutbus.bus.wire.outgoing import sealed
from rolloutbus.trainer_adapter.client.asks import GenerateOptions, ask_of
from rolloutbus.trainer_adapter.client.core.effects import Effect
from rolloutbus.trainer_adapter.client.core.requests import Ask
from tests.conformance.representatives import NAMES
from tests.unit.trainer_adapter.bench import Bench, ints

DEEP: list[Any] = []
DEEP.append(DEEP)


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Rows(list[Any]):
    pass


@enum.unique
class Colour(enum.Enum):
    RED = object()


HOSTILE = [
    *(None, True, 0, -1, 7, 1 << 63, 1 << 64, 1 << 80, -(1 << 70), 1.5, 1e400, float("nan")),
    *("", "x", "\ud800", "x" * 300, b"", b"\xff", bytearray(b"ab"), memoryview(b"abcd")),
    *([], [None], ["\ud800"], [1 << 80], DEEP, {}, {"\ud800": 1}, {1 << 80: 1}, {None: object()}),
    *(
        (),
        {1},
        object(),
        Exception,
        Colour.RED,
        1j,
        Text("x"),
        Text("\ud800"),
        Number(7),
        Rows([1]),
    ),
    *(np.int64(7), np.uint64(1 << 63), np.float32(0.5), np.longdouble(0.5), np.array([True])[0]),
    *(np.str_("x"), np.bytes_(b"x"), np.array([1, 2]), np.array(["x", None]), np.zeros((2, 2))),
    *(np.datetime64("2026-01-01"), SamplingParams(), Placement("default", priority=1 << 80)),
]


def _fields(struct: msgspec.Struct, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Each field of a message, and of the messages in it."""
    for name in struct.__struct_fields__:
        yield (*path, name)
        value = getattr(struct, name)
        if isinstance(value, msgspec.Struct):
            yield from _fields(value, (*path, name))


def _with(struct: msgspec.Struct, path: tuple[str, ...], value: object) -> Any:  # noqa: ANN401
    """The message with one field changed."""
    name, *rest = path
    if rest:
        value = _with(getattr(struct, name), tuple(rest), value)
    return msgspec.structs.replace(struct, **{name: value})


SOUND: dict[str, msgspec.Struct] = {kind: unpack(NAMES[kind]) for kind in sorted(COMMANDS)}
PLACES = [
    *((kind, path) for kind, body in SOUND.items() for path in _fields(body)),
    *(("", ("place", name)) for name in Placement.__struct_fields__),
    *(("", (name,)) for name in ("route", "rid")),
]


def _ask(place: tuple[str, tuple[str, ...]], value: object) -> Ask:
    kind, path = place
    if kind:
        return Ask(kind, _with(SOUND[kind], path, value))
    sound = Ask("attach", SOUND["attach"], rid="c/7", place=Placement("default"))
    if path[0] == "place":
        return Ask("generate", SOUND["generate"], place=_with(Placement("d"), path[1:], value))
    changes: dict[str, Any] = {path[0]: value}
    return msgspec.structs.replace(sound, **changes)


def _refusal_of(call: Callable[[], object]) -> Refused | None:
    """What the call was refused with; any other error is the test's."""
    try:
        call()
    except Refused as refusal:
        return refusal
    return None


@settings(max_examples=1000, deadline=None)
@given(place=st.sampled_from(PLACES), value=st.sampled_from(HOSTILE))
def test_hostile_value_is_refused_by_name_or_can_be_sent(
    place: tuple[str, tuple[str, ...]], value: object
) -> None:
    bench = Bench()
    bench.welcome()
    innocent = [bench.generate(), bench.generate()]
    effects: list[Effect] = []
    refusal = _refusal_of(
        lambda: effects.extend(bench.core.submit(_ask(place, value), 60.0, bench.clock.now())[1])
    )
    if refusal is not None:
        assert (refusal.code, refusal.outcome) == ("bad_request", "not_started")
        assert refusal.field.split("[")[0].startswith(place[1][0])
        assert bench.core.n_open == len(innocent)
    bench.apply(effects)  # what is sent crosses the codec
    bench.welcome(epoch=2, instance="r2")
    bench.pass_time(3.0)
    sent: list[Entry] = bench.take("generate")
    assert {entry.rid for entry in sent} >= set(innocent)
    assert all(rid not in bench.outcomes for rid in innocent)


@pytest.mark.parametrize("deadline_s", [None, "3", float("nan"), float("inf"), 10**400, [1]])
def test_deadline_that_is_no_number_of_seconds_is_refused(bench: Bench, deadline_s: Any) -> None:  # noqa: ANN401
    with pytest.raises(Refused) as caught:
        bench.generate(deadline_s=deadline_s)
    assert caught.value.field == "deadline_s"
    assert bench.core.n_open == 0


def test_a_refused_field_is_called_as_its_caller_calls_it() -> None:
    """A seed travels under another name than it has here."""
    body = _with(SOUND["generate"], ("sampling", "sampling_seed"), "seven")
    refusal = _refusal_of(lambda: sealed(body, Generate))
    assert refusal is not None
    assert refusal.field == "sampling.sampling_seed"


def test_numbers_of_numpy_are_sent_as_what_they_are(bench: Bench) -> None:
    sampling = SamplingParams(
        sampling_seed=np.int64(7), temperature=np.float32(0.5), stop_token_ids=np.array([2])
    )  # type: ignore[arg-type]
    body = Generate(ints(1), sampling)
    _, effects = bench.core.submit(Ask("generate", body, place=Placement("d")), 9, 0.0)
    bench.apply(effects)
    (sent,) = bench.bodies("generate", Generate)
    assert sent.sampling == SamplingParams(sampling_seed=7, temperature=0.5, stop_token_ids=[2])


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(SamplingParams.__struct_fields__), value=st.sampled_from(HOSTILE))
def test_hostile_sampling_of_a_call_is_refused_by_name_or_made_plain(
    name: str, value: object
) -> None:
    def call() -> None:
        Bench().core.submit(ask_of([1, 2], _with(SamplingParams(), (name,), value)), 5.0, 0.0)

    refusal = _refusal_of(call)
    if refusal is not None:
        assert refusal.field.startswith((f"sampling.{name}", "place.cost"))


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(
        ["session", "group", "versions", "policy", "priority", "lora", "detached"]
    ),
    value=st.sampled_from(HOSTILE),
)
def test_hostile_option_of_a_call_is_refused(name: str, value: object) -> None:
    options: Any = {name: value}
    checked: GenerateOptions = options
    core = Bench().core
    refusal = _refusal_of(
        lambda: core.submit(ask_of([1, 2], SamplingParams(), **checked), 5.0, 0.0)
    )
    if refusal is not None:
        assert ("outlives_client" if name == "detached" else name) in refusal.field
        assert core.n_open == 0
