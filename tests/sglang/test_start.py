"""An engine that cannot start says why, once."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import rolloutbus
from rolloutbus.errors import ProcessFailed
from tests.sglang.fleets import fleet_of
from tests.tiny_models import claim_too_much

pytestmark = pytest.mark.asyncio(loop_scope="session")


def of_no_known_kind(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["NobodysForCausalLM"]
    (model / "config.json").write_text(json.dumps(config))


def with_rubbish_for_weights(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"rubbish")


@pytest.mark.shows("a model that cannot be loaded")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("spoil", "why"),
    [(of_no_known_kind, "NobodysForCausalLM"), (with_rubbish_for_weights, "header too small")],
)
async def test_a_model_that_cannot_be_loaded_is_named_with_its_fault(
    llama: Path, tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    spoil(broken)

    with pytest.raises(ProcessFailed, match=why):
        async with rolloutbus.up(**fleet_of(broken)):
            pass


@pytest.mark.shows("a model that does not fit")
async def test_a_model_that_cannot_fit_is_refused_before_it_is_read(
    llama: Path, tmp_path: Path
) -> None:
    huge = tmp_path / "huge"
    shutil.copytree(llama, huge)
    claim_too_much(huge)

    with pytest.raises(ProcessFailed, match="out of memory before it is loaded"):
        async with rolloutbus.up(**fleet_of(huge)):
            pass


@pytest.mark.shows("unknown arguments")
async def test_an_argument_that_sglang_does_not_have_is_refused_with_a_hint(llama: Path) -> None:
    with pytest.raises(ProcessFailed, match="did you mean mem_fraction_static"):
        async with rolloutbus.up(**fleet_of(llama, mem_fraction_statik=0.5)):
            pass
