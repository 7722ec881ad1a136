"""A fleet and programs with SkyRL's code on it, for the tests of both versions."""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import LlamaForCausalLM

from rolloutbus import Fleet, RolloutClient
from rolloutbus.bus.wire.messages.control import ServerFacts
from tests.integration.reciting_model import SIZE, save_reciting_model
from tests.line_process import LineProcess, line_processes
from tests.lora_adapters import random_lora
from tests.tiny_models import TOLERANCE, fresh

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0
LONG = 2000
"""Tokens of a response that is under way for seconds."""
ENGINE = "generator.inference_engine"
WORDS: dict[str, tuple[str, object, dict[str, object]]] = {
    "engines": (f"{ENGINE}.num_engines", 3, {"workers": 3}),
    "tensor parallel": (f"{ENGINE}.tensor_parallel_size", 2, {"tp_size": 2}),
    "expert parallel": (f"{ENGINE}.expert_parallel_size", 2, {"ep_size": 2}),
    "memory": (f"{ENGINE}.gpu_memory_utilization", 0.5, {"mem_fraction_static": 0.5}),
    "rows": (f"{ENGINE}.max_num_seqs", 64, {"slots": 64}),
    "prefill": (f"{ENGINE}.max_num_batched_tokens", 4096, {"max_prefill_tokens": 4096}),
    "cache": (f"{ENGINE}.enable_prefix_caching", False, {"disable_radix_cache": True}),
    "chunks": (f"{ENGINE}.enable_chunked_prefill", False, {"chunked_prefill_size": -1}),
    "graphs": (f"{ENGINE}.enforce_eager", True, {"disable_cuda_graph": True}),
    "dtype": (f"{ENGINE}.model_dtype", "bfloat16", {"dtype": "bfloat16"}),
    "colocated": ("trainer.placement.colocate_all", True, {"enable_memory_saver": True}),
    "seed": ("trainer.seed", 7, {"random_seed": 7}),
    "model": ("trainer.policy.model.path", "other", {"model": "other"}),
    "adapter": (
        "trainer.policy.model.lora.rank",
        4,
        {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["all"]},
    ),
}
"""Words of SkyRL's with another value than there was -> what that alone changes of a fleet."""
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


async def running(client: RolloutClient, n: int) -> None:
    """Wait until engines run so many requests."""
    async with asyncio.timeout(DEADLINE_S):
        while sum(each.n_running for each in (await facts(client)).values()) < n:
            pass


async def facts(client: RolloutClient) -> dict[str, ServerFacts]:
    """What the engines say of themselves."""
    told = (await client.server_info(check=False)).by_worker
    return {name: each for name, each in told.items() if isinstance(each, ServerFacts)}


def rows_of(told: dict[str, Any]) -> list[tuple[list[int], str, list[list[int]]]]:
    """(tokens, worker, version runs) of all that the engines have returned."""
    return [
        row
        for each in told["sampled"]
        for row in zip(each["response_ids"], each["workers"], each["weight_versions"], strict=True)
    ]


async def check_dialogues(trainer: Trainer) -> None:
    """Have SkyRL's generator talk with its environments: its loss masks mark what was sampled."""
    n_dialogues, n_turns, n_tokens = 4, 3, 5
    told = await trainer.do("trajectories", n=n_dialogues, max_tokens=n_tokens)
    output = told["output"]
    masked: list[list[int]] = []
    for tokens, mask, logprobs in zip(
        output["response_ids"], output["loss_masks"], output["rollout_logprobs"], strict=True
    ):
        assert len(tokens) == len(mask) == len(logprobs)
        assert mask[n_tokens] == 0, "what the environment says is masked"
        own = [token for token, is_sampled in zip(tokens, mask, strict=True) if is_sampled]
        masked += [own[start : start + n_tokens] for start in range(0, len(own), n_tokens)]
    assert len(masked) == n_dialogues * n_turns
    assert sorted(masked) == sorted(tokens for tokens, _, _ in rows_of(told))


async def check_adapter(trainer: Trainer, model: Path, directory: Path) -> None:
    """Bring an adapter as SkyRL writes it: it samples, and the model itself is as it was."""
    plain = cast("Any", LlamaForCausalLM).from_pretrained(model, dtype=torch.float32)
    lora = random_lora(plain, 7)
    lora.save(directory)
    prompts = [[2], [3], [4], [5]]
    await trainer.do("use_adapter", is_used=True)
    await trainer.do("adapter", directory=str(directory))
    output = (await trainer.do("sample", prompts=prompts, max_tokens=6))["output"]
    merged = lora.merged(plain)
    for prompt, tokens, logprobs in zip(
        prompts, output["response_ids"], output["response_logprobs"], strict=True
    ):
        expected = fresh(merged, np.array([*prompt, *tokens], np.int32), len(prompt))
        assert np.abs(np.array(expected) - np.array(logprobs)).max() < TOLERANCE
    await trainer.do("use_adapter", is_used=False)
    output = (await trainer.do("sample", prompts=prompts, max_tokens=6))["output"]
    assert output["response_ids"] == [said_after(prompt, 6) for prompt in prompts]


async def check_word(
    trainer: Trainer, word: str, value: object, changed: dict[str, object]
) -> None:
    """A word of SkyRL's is one of the fleet's, and changes nothing else."""
    before = _flat(await trainer.do("options"))
    after = _flat(await trainer.do("options", **{word: value}))
    assert {name: each for name, each in after.items() if before.get(name) != each} == changed


def _flat(options: dict[str, Any]) -> dict[str, Any]:
    """Of `rolloutbus.up`, with those of the engine and the arguments of SGLang beside them."""
    engine = options.pop("engine_options")
    return {**engine.pop("arguments"), **engine, **options}


async def check_page(trainer: Trainer) -> None:
    """The page explains each word that SkyRL has for engines."""
    page = (ROOT / "docs" / "adapters" / "skyrl.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`([A-Za-z_0-9]+)`", page))
    assert set(await trainer.do("words")) - explained == set()
