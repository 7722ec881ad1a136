"""The name of a model chooses policy, version and adapter."""

import pytest

from rolloutbus.errors import Refused
from rolloutbus.gateway.models import options_of_model
from rolloutbus.trainer_adapter.client.asks import GenerateOptions

POLICIES = {"default", "critic"}


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("", {}),
        ("tiny", {}),
        ("default", {}),
        ("critic", {"policy": "critic"}),
        ("tiny@7", {"versions": "exact:7"}),
        ("@7", {"versions": "exact:7"}),
        ("critic@0", {"policy": "critic", "versions": "exact:0"}),
        ("tiny:math", {"lora": "math"}),
        ("tiny:math@3", {"lora": "math@3"}),
        ("critic@7:math", {"policy": "critic", "versions": "exact:7", "lora": "math"}),
    ],
)
def test_a_name_is_read(model: str, wanted: GenerateOptions) -> None:
    assert options_of_model(model, ["tiny"], POLICIES) == wanted


def test_a_served_name_may_look_like_anything() -> None:
    assert options_of_model("org/model@7:b", ["tiny", "org/model@7:b"], POLICIES) == {}


@pytest.mark.parametrize("model", ["tiny@x", "tiny@", "tiny:", "tiny@7@8"])
def test_another_form_is_refused(model: str) -> None:
    with pytest.raises(Refused) as caught:
        options_of_model(model, ["tiny"], POLICIES)
    assert (caught.value.code, caught.value.field) == ("bad_request", "model")


def test_an_unknown_name_hears_of_the_nearest() -> None:
    with pytest.raises(Refused, match="did you mean 'critic'") as caught:
        options_of_model("critik", ["tiny"], POLICIES)
    assert caught.value.code == "unknown_model"
    with pytest.raises(Refused, match="there are critic, default, tiny"):
        options_of_model("gpt-4o", ["tiny"], POLICIES)
