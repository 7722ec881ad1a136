# pyright: reportUnknownMemberType=false
# The stubs of torch and transformers leave parameters untyped.

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from rolloutbus.examples.task import VOCABULARY, prompt_tokens
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model


def test_same_seed_builds_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in [("a", 3), ("b", 3), ("c", 4)]:
        build_tiny_model(tmp_path / name, seed)
    files = [tmp_path / name / "model.safetensors" for name in ("a", "b", "c")]

    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes() != files[2].read_bytes()


def test_building_leaves_the_callers_randomness_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()

    build_tiny_model(tmp_path, seed=0)

    assert torch.equal(before, torch.random.get_rng_state())


def test_model_is_tiny_and_knows_the_tasks_vocabulary(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, seed=0)

    model = load_tiny_model(tmp_path)

    assert 300_000 <= sum(each.numel() for each in model.parameters()) <= 3_000_000
    assert model.config.vocab_size == len(VOCABULARY)


def test_tokenizer_reads_a_prompt_as_the_task_writes_it(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, seed=0)

    automatic: Any = AutoTokenizer
    tokenizer = automatic.from_pretrained(tmp_path, local_files_only=True)

    assert tokenizer("<s>padlock=")["input_ids"] == prompt_tokens("padlock")
