"""Iterators whose tensors exist one at a time: what is published is what each of them was then."""

import random
import weakref
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import torch

from rolloutbus.bus.weights.manifest import bytes_of, digest_of, lay_out, total_bytes
from rolloutbus.bus.wire.errors import Refused, SettingsError
from rolloutbus.trainer_adapter.publisher.lora import factors_of
from rolloutbus.trainer_adapter.publisher.publisher import source_of
from rolloutbus.trainer_adapter.publisher.sharded import ShardedSource
from rolloutbus.trainer_adapter.publisher.tensor_source import (
    DTYPE_NAMES,
    HeldTensors,
    StreamedTensors,
    are_held,
)
from rolloutbus.trainer_adapter.publisher.weight_writer import CopyWatch, copy_all

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool]
Values = list[tuple[str, torch.Tensor]]
Digests = dict[str, int]


class Poisoned:
    """Gives tensors out of one buffer, or merged into the model, and undoes each at the next."""

    def __init__(self, values: Values, rng: random.Random) -> None:
        self._values = values
        self._rng = rng
        self.was_closed = False

    def __iter__(self) -> Generator[tuple[str, torch.Tensor]]:
        size = max(each.nbytes for _, each in self._values)
        staging = torch.empty(size, dtype=torch.uint8)
        try:
            for name, value in self._values:
                if self._rng.random() < 0.5:  # gathered into the buffer that all share
                    given = staging[: value.nbytes].view(value.dtype).view(value.shape)
                    given.copy_(value)
                    yield name, given
                    staging.fill_(0xA5)
                else:  # its own memory, which is nobody's afterwards
                    given = value.clone()
                    if given.dim() > 1 and self._rng.random() < 0.5:
                        given = given.t().contiguous().t()
                    yield name, given
                    given.fill_(1)
        finally:
            self.was_closed = True


def values_of(rng: random.Random) -> Values:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    values: Values = []
    for i in range(rng.randrange(1, 12)):
        shape = tuple(rng.randrange(0, 40) for _ in range(rng.randrange(0, 3)))
        dtype = rng.choice(DTYPES)
        values.append((f"t{i}", (torch.randn(shape, generator=generator) * 3).to(dtype)))
    return values


def digests_of(values: Values, cast: torch.dtype | None) -> Digests:
    cast_to = [each.to(cast) if cast and each.is_floating_point() else each for _, each in values]
    raw = [each.contiguous().reshape(-1).view(torch.uint8).numpy() for each in cast_to]
    return {name: digest_of(each) for (name, _), each in zip(values, raw, strict=True)}


def published(source: HeldTensors | StreamedTensors, cast: torch.dtype | None) -> Digests:
    """What a publication writes of it."""
    if isinstance(source, StreamedTensors) and not source.has_layout:
        source = source.held_copies(cast, lambda: None)
    layout = lay_out(
        (
            each.name,
            DTYPE_NAMES[cast if cast and each.dtype.is_floating_point else each.dtype],
            each.shape,
        )
        for each in source.tensors
    )
    content = np.zeros(total_bytes(layout), np.uint8)
    copy_all(content, layout, source, CopyWatch(lambda _: None), 2)
    return {each.name: digest_of(bytes_of(content, each)) for each in layout}


def test_names_are_translated_once() -> None:
    def renamed(name: str) -> str:
        return f"module.{name}"

    given = [("w", torch.ones(2)), ("module.w", torch.zeros(2))]
    held = StreamedTensors(iter(given), renamed).held_copies(None, lambda: None)
    assert [each.name for each in held.tensors] == ["module.w", "module.module.w"]


@pytest.mark.parametrize("has_layout", [True, False], ids=["layout", "no layout"])
def test_what_an_iterator_gave_is_published_whatever_becomes_of_it(
    rng: random.Random, *, has_layout: bool
) -> None:
    for _ in range(40):
        values = values_of(rng)
        cast = rng.choice([None, torch.bfloat16])
        layout = [(name, each.dtype, tuple(each.shape)) for name, each in values]
        poisoned = Poisoned(values, rng)
        source = source_of(iter(poisoned), None, layout if has_layout else None)
        assert isinstance(source, StreamedTensors)
        assert published(source, cast) == digests_of(values, cast)
        assert poisoned.was_closed


def test_no_tensor_is_held_when_the_next_is_asked_for() -> None:
    storages: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[int] = []

    def fresh() -> Generator[tuple[str, torch.Tensor]]:
        for i in range(5):
            alive.append(sum(each() is not None for each in storages))
            given = torch.full((64,), float(i + 1))
            storages.append(weakref.ref(given.untyped_storage()))
            yield f"t{i}", given
            del given

    layout = [(f"t{i}", torch.float32, (64,)) for i in range(5)]
    source = source_of(fresh(), None, layout)
    assert isinstance(source, StreamedTensors)
    assert len(published(source, None)) == 5
    assert alive == [0] * 5


def test_equal_tensors_of_one_buffer_are_all_published() -> None:
    buffer = torch.ones(8)
    found = published(StreamedTensors((name, buffer) for name in ("norm.0", "norm.1")), None)
    assert set(found) == {"norm.0", "norm.1"}


def test_names_are_translated_in_the_layout_too() -> None:
    def rename(name: str) -> str | None:
        return None if name == "skip" else f"engine.{name}"

    pairs = [("a", torch.ones(3)), ("skip", torch.ones(2)), ("b", torch.ones(4))]
    layout = [(name, each.dtype, tuple(each.shape)) for name, each in pairs]
    source = StreamedTensors(iter(pairs), rename, layout)
    assert set(published(source, None)) == {"engine.a", "engine.b"}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([("a", torch.ones(3))], "layout.b"),
        ([("b", torch.ones(4)), ("a", torch.ones(3))], "layout.a"),
        ([("a", torch.ones(3).bfloat16()), ("b", torch.ones(4))], "layout.a"),
        ([("a", torch.ones(3)), ("b", torch.ones(5))], "layout.b"),
        ([("a", torch.ones(3)), ("b", torch.ones(4)), ("c", torch.ones(1))], "layout.c"),
    ],
    ids=["too few", "other order", "other dtype", "other shape", "too many"],
)
def test_an_iterator_that_departs_from_its_layout_is_refused(given: Values, field: str) -> None:
    layout = [("a", torch.float32, (3,)), ("b", torch.float32, (4,))]
    with pytest.raises(Refused) as caught:
        published(StreamedTensors(iter(given), None, layout), None)
    assert caught.value.field == field


def test_giving_up_lets_the_iterator_undo_what_it_did(rng: random.Random) -> None:
    values = [("a", torch.ones(2)), ("b", torch.ones(2))]
    poisoned = Poisoned(values, rng)
    source = StreamedTensors(iter(poisoned))
    next(source.buckets())
    source.give_up()
    assert poisoned.was_closed


def test_the_iterator_runs_in_its_callers_inference_mode() -> None:
    weight = torch.zeros(2)

    def merging() -> Generator[tuple[str, torch.Tensor]]:
        modes.append(torch.is_inference_mode_enabled())
        yield "w", weight

    modes: list[bool] = []
    with torch.inference_mode():
        source = StreamedTensors(merging())
    published(source, None)
    assert modes == [True]


def held_ways() -> list[Callable[[torch.nn.Module], object]]:
    return [
        lambda model: model,
        lambda model: model.state_dict(),
        lambda model: model.named_parameters(),
        lambda model: model.state_dict().items(),
        lambda model: list(model.named_parameters()),
    ]


@pytest.mark.parametrize("way", held_ways())
def test_what_a_model_holds_is_read_where_it_lies(
    way: Callable[[torch.nn.Module], HeldTensors],
) -> None:
    model = torch.nn.Linear(2, 3)
    assert isinstance(source_of(way(model)), HeldTensors)


def test_an_iterators_adapter_is_what_it_was_when_it_was_given() -> None:
    buffer = torch.empty(4, 4)

    def merged() -> Generator[tuple[str, torch.Tensor]]:
        for i, half in enumerate("AB"):
            yield f"m.lora_{half}.weight", buffer.fill_(i + 1)

    found = factors_of(merged())
    assert [float(each[0, 0]) for each in found.values()] == [1.0, 2.0]


def test_a_source_that_remembers_its_tensors_takes_no_iterator() -> None:
    pairs = ((name, torch.ones(1)) for name in "ab")
    assert not are_held(pairs)
    with pytest.raises(SettingsError, match="iterator"):
        ShardedSource(pairs)


def test_a_layout_needs_dtypes_that_can_be_published() -> None:
    with pytest.raises(SettingsError, match=r"tensor 'w': torch\.complex128 cannot be published"):
        source_of(iter(()), None, [("w", torch.complex128, (2,))])


def test_a_layout_needs_dtypes_of_torch() -> None:
    with pytest.raises(SettingsError, match="torch"):
        StreamedTensors(iter([("a", torch.ones(1))]), None, [("a", "float32", (1,))])  # type: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "entry",
    [
        ("a", torch.float32),
        ("a", torch.float32, -1),
        ("a", torch.float32, (-1, 2)),
        ("a", torch.float32, ("x",)),
        (1, torch.float32, (1,)),
        "abc",
        None,
    ],
)
def test_a_layout_of_something_else_is_told_in_a_sentence(entry: object) -> None:
    layout: Any = [entry]
    with pytest.raises(SettingsError, match="layout"):
        StreamedTensors(iter([("a", torch.ones(1))]), None, layout)


class Lazy(dict[str, torch.Tensor]):
    """Makes each tensor in one buffer, when it is asked for."""

    def items(self) -> Any:  # noqa: ANN401 - no view of the dict
        buffer = torch.empty(1)
        return ((name, buffer.copy_(each)) for name, each in super().items())


def test_a_dict_that_makes_its_tensors_when_asked_is_read_as_an_iterator() -> None:
    lazy = Lazy({name: torch.full((1,), float(i)) for i, name in enumerate("abc")})
    source = source_of(lazy)
    assert isinstance(source, StreamedTensors)
    held = source.held_copies(None, lambda: None)
    assert {each.name: float(t) for each, t in zip(held.tensors, held.held, strict=True)} == {
        "a": 0.0,
        "b": 1.0,
        "c": 2.0,
    }
