"""What a model without weight files is to be given: the tensors that its checkpoint would hold."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# The stubs of safetensors and transformers leave parameters untyped.

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file

from rolloutbus.engine_worker.engines.shared.made_up_weights import checkpoint_tensors

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Qwen2", {}),
        ("Qwen3Moe", EXPERTS),  # its experts are one tensor in the module, and many in files
    ],
)
def test_names_and_shapes_are_those_of_the_files(
    tmp_path: Path, name: str, fields: dict[str, Any]
) -> None:
    config = getattr(transformers, f"{name}Config")(**SMALL, **fields)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    found = checkpoint_tensors(tmp_path)
    assert {name: each.shape for name, each in found.items()} == {
        name: each.shape for name, each in files.items()
    }


def test_a_model_that_transformers_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    transformers.LlamaConfig(**SMALL, architectures=["Nessie"]).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Nessie"]
    with pytest.raises(ValueError, match="Nessie"):
        checkpoint_tensors(tmp_path)
