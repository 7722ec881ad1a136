"""A fleet and programs with SkyRL's code on it, for the tests of both versions."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import LlamaForCausalLM

from rolloutbus import Fleet
from tests.integration.reciting_model import SIZE, save_reciting_model
from tests.line_process import LineProcess, line_processes

ROOT = Path(__file__).parents[2]
STEP, START = 5, 3
"""Token t is followed by (t * STEP + START + shift) % SIZE; a shift tells weights apart."""


def save_counting_model(path: Path) -> None:
    """Write a model whose every token has one successor, and a tokenizer with a chat template."""
    path.mkdir()
    save_reciting_model(path)
    model = cast("Any", LlamaForCausalLM).from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        for token in range(SIZE):
            model.lm_head.weight[follower(token), token] = 10.0
    model.save_pretrained(path)


def follower(token: int, shift: int = 0) -> int:
    """What the weights of this shift say after it."""
    return (token * STEP + START + shift) % SIZE


def said_after(prompt: Sequence[int], n: int, shift: int = 0) -> list[int]:
    """The next `n` tokens."""
    tokens = [prompt[-1]]
    for _ in range(n):
        tokens.append(follower(tokens[-1], shift))
    return tokens[1:]


class Refusal(Exception):
    """What a program was told instead of a value."""


class Trainer:
    """A program with SkyRL's code."""

    def __init__(self, process: LineProcess) -> None:
        self._process = process

    async def do(self, order: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        """Has it do something; see `Trainer` in skyrl_program.py."""
        answer = await self._process.ask(order, **arguments)
        if "error" in answer:
            raise Refusal(f"{answer['error']}: {answer['message']}")
        return answer["value"]

    async def call(self, method: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        """Calls a method of its client."""
        return await self.do("call", method=method, **arguments)


@asynccontextmanager
async def trainers(
    version: str, fleet: Fleet, model: Path, directory: Path, num_engines: int, world: int = 1
) -> AsyncGenerator[list[Trainer]]:
    """Programs in the environment of this version of SkyRL, one for each rank.

    `num_engines` 0: the fleet itself stands in the place of SkyRL's client.
    """
    python = ROOT / f".venv-skyrl-{version}" / "bin" / "python"
    meeting = directory / f"ranks-{num_engines}-{world}"
    programs = [
        (
            *("tests.adapters.skyrl_program", fleet.address, str(model), str(num_engines)),
            *(str(rank), str(world), str(meeting)),
        )
        for rank in range(world)
    ]
    async with line_processes(programs, python) as processes:
        yield [Trainer(each) for each in processes]
