"""SGLang's own benchmark, unmodified, and the scores that trainers ask for, at a gateway."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from rolloutbus import Fleet
from tests.integration.gateway_process import Gateway, gateway
from tests.sglang.reference import SameWeights

pytestmark = pytest.mark.asyncio(loop_scope="session")

N_PROMPTS = 6
N_TOKENS = 8
PROMPT = [5, 6, 7, 8, 9]
TOLERANCE = 1e-4
PROGRAM_S = 600.0
"""It imports SGLang, transformers and what reads datasets."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(fleet: Fleet, llama: Path) -> AsyncIterator[Gateway]:
    arguments = ["--address", fleet.address, "--tokenizer", str(llama)]
    async with gateway(*arguments, "--served-model-name", str(llama)) as running:
        yield running


@pytest.mark.shows("enable_http_endpoint")
@pytest.mark.parametrize("backend", ["sglang", "sglang-oai"])
async def test_bench_serving_measures_a_gateway(
    served: Gateway, llama: Path, tmp_path: Path, backend: str
) -> None:
    results = tmp_path / "results.jsonl"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", backend),
        *("--base-url", served.url, "--model", str(llama), "--tokenizer", str(llama)),
        *("--dataset-name", "random-ids", "--num-prompts", str(N_PROMPTS)),
        *("--random-input-len", "16", "--random-output-len", str(N_TOKENS)),
        *("--random-range-ratio", "1", "--output-file", str(results), "--disable-tqdm"),
        stdout=PIPE,
        stderr=STDOUT,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    try:
        async with asyncio.timeout(PROGRAM_S):
            told, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, told.decode()
    [result] = map(json.loads, results.read_text().splitlines())
    assert result["completed"] == N_PROMPTS, told.decode()
    assert result["total_output_tokens"] == N_PROMPTS * N_TOKENS, "each gets what it asked for"
    assert 0 < result["median_ttft_ms"] < result["median_e2e_latency_ms"], "tokens are streamed"


@pytest.mark.parametrize("start", [0, 2])
async def test_a_prompt_is_scored_without_a_sample(
    served: Gateway, reference: SameWeights, start: int
) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 2,
    }
    reply = (await served.ask("POST", "/generate", body)).json
    meta = reply["meta_info"]
    assert reply["output_ids"] == meta["output_token_logprobs"] == []
    assert meta["completion_tokens"] == 0
    told = meta["input_token_logprobs"]
    assert [token for _, token, *_ in told] == PROMPT[start:]
    assert (told[0][0] is None) == (start == 0), "the first token of a prompt has no logprob"
    assert len(meta["input_top_logprobs"]) == len(told)
    with torch.no_grad():
        truth = reference.model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    for place, (logprob, token, *_) in enumerate(told, start):
        assert place == 0 or abs(logprob - float(truth[place - 1, token])) < TOLERANCE
