import pytest
import torch

from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.trainer_adapter.publisher.tensor_source import (
    named_tensors,
    published_dtype,
    require_castable,
)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("kind", ["module", "state_dict", "pairs"])
def test_tied_weights_are_published_once_under_their_first_name(kind: str) -> None:
    model = Tied()
    pairs = list(model.named_parameters(remove_duplicate=False))
    given = {"module": model, "state_dict": model.state_dict(), "pairs": pairs}[kind]
    assert [name for name, _ in named_tensors(given)] == ["embed.weight"]


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_buffer_that_is_used_again_in_a_list_is_no_tied_tensor(kind: type) -> None:
    buffer = torch.zeros(2, 3)
    with pytest.raises(SettingsError, match=r"'a' and 'b' .* same memory: clone each") as caught:
        named_tensors(kind([("a", buffer), ("b", buffer.view(2, 3))]))
    assert "leave 'b' out" in str(caught.value)


def test_views_of_one_storage_that_differ_are_all_published() -> None:
    whole = torch.zeros(4, 4)
    pairs = [("whole", whole), ("turned", whole.t()), ("half", whole[:2]), ("empty", whole[:0])]
    assert [name for name, _ in named_tensors(pairs)] == ["whole", "turned", "half", "empty"]


@pytest.mark.parametrize(
    ("given", "published"),
    [
        ("module.lm_head.weight", "lm_head.weight"),
        ("module.module.lm_head.weight", "lm_head.weight"),
        ("_orig_mod.module.lm_head.weight", "lm_head.weight"),
        ("model.layers.0._orig_mod.mlp.weight", "model.layers.0.mlp.weight"),
        (
            "_fsdp_wrapped_module.model._fsdp_wrapped_module._checkpoint_wrapped_module.w",
            "model.w",
        ),
        ("model.module.weight", "model.module.weight"),
        ("module", "module"),
    ],
)
def test_names_lose_what_wrappers_put_into_them(given: str, published: str) -> None:
    tensors = {given: torch.zeros(2)}
    assert [name for name, _ in named_tensors(tensors)] == [published]
    assert [name for name, _ in named_tensors(tensors, lambda name: name)] == [given]


def test_a_module_in_a_wrapper_is_published_under_its_own_names() -> None:
    wrapped = torch.nn.DataParallel(Tied())
    assert [name for name, _ in named_tensors(wrapped)] == ["embed.weight"]


def test_a_view_of_other_values_is_no_tied_tensor() -> None:
    whole = torch.randn(4, dtype=torch.complex64)
    given = {"a": whole, "b": whole.conj(), "c": whole.imag, "d": whole.conj().imag}
    assert [name for name, _ in named_tensors(given)] == [*given]


def test_names_that_only_wrappers_told_apart_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"two different tensors have the name 'w'"):
        named_tensors({"module.w": torch.zeros(2), "w": torch.zeros(2)})


def test_what_cannot_be_published_is_named() -> None:
    with pytest.raises(SettingsError, match="'z'"):
        named_tensors({"z": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(SettingsError, match="no tensors"):
        named_tensors({})


def test_a_cast_leaves_integers_alone() -> None:
    assert published_dtype(torch.float32, torch.bfloat16) == torch.bfloat16
    assert published_dtype(torch.int64, torch.bfloat16) == torch.int64
    assert published_dtype(torch.float64, None) == torch.float64


def test_a_tied_tensor_whose_first_name_is_dropped_keeps_its_second() -> None:
    found = named_tensors(Tied(), lambda name: None if name == "embed.weight" else name)
    assert [name for name, _ in found] == ["head.weight"]


def test_two_tensors_that_are_given_one_name_are_refused() -> None:
    with pytest.raises(SettingsError, match="'same'"):
        named_tensors({"a": torch.zeros(2), "b": torch.zeros(2)}, lambda _: "same")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fnuz, torch.complex64])
def test_weights_are_cast_to_nothing_that_cannot_hold_them(dtype: torch.dtype) -> None:
    with pytest.raises(SettingsError, match=f"cannot be cast to {dtype}"):
        require_castable(dtype)
