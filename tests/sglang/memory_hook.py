"""A hook for SGLang's forward pass that wants too much memory once, and that can be slow."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

EXHAUSTING_TOKEN = 509
"""The token that makes it want memory, if the file `once` is there; it takes the file away."""
TOO_MUCH = 1 << 50
"""Bytes."""
SLOW_S = 0.1
"""Of each step while the file `slow` is there."""

Hook = Callable[[object, Sequence[torch.Tensor], object], None]


def hook_of(config: dict[str, str]) -> Hook:
    """What SGLang calls after the embedding of each step; `config` says where the files are."""
    once, slow = Path(config["once"]), Path(config["slow"])

    def look(module: object, inputs: Sequence[torch.Tensor], output: object) -> None:
        del module, output
        if slow.exists():
            time.sleep(SLOW_S)
        if once.exists() and bool((inputs[0] == EXHAUSTING_TOKEN).any()):
            once.unlink()
            torch.empty(TOO_MUCH, dtype=torch.uint8)

    return look
