"""What SGLang's own parameters do, beside what this worker does in their place.

The table that it prints is the one of docs/decisions/0009: `pytest -s -m sglang -k public`.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

import rolloutbus
from rolloutbus import Rollout, RolloutClient, SamplingParams
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from tests.sglang.conftest import DEADLINE_S
from tests.sglang.fleets import engine_options, fleet_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [50, 51, 52]
N_TOKENS, N_KEPT = 24, 8
GREEDY = SamplingParams(max_new_tokens=N_TOKENS, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=N_TOKENS, temperature=0.9, ignore_eos=True)
MASK = {"return_sampling_mask": True}
SUPPORT = {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}


class Case(NamedTuple):
    """One request, and what SGLang has to be asked for besides its sampling."""

    sampling: SamplingParams
    fields: Mapping[str, Any] = {}


CASES: Mapping[str, Case] = {
    "no penalty": Case(GREEDY),
    "frequency_penalty=0.5": Case(msgspec.structs.replace(GREEDY, frequency_penalty=0.5)),
    "presence_penalty=0.4": Case(msgspec.structs.replace(GREEDY, presence_penalty=0.4)),
    "repetition_penalty=1.7": Case(msgspec.structs.replace(GREEDY, repetition_penalty=1.7)),
    "repetition_penalty=3": Case(msgspec.structs.replace(GREEDY, repetition_penalty=3.0)),
    "min_new_tokens=12": Case(
        SamplingParams(
            max_new_tokens=N_TOKENS,
            temperature=0.0,
            min_new_tokens=12,
            stop_token_ids=[*range(384, 512)],
        )
    ),
    "top_k=5, mask": Case(msgspec.structs.replace(DRAWN, top_k=5), MASK),
    "top_k=7, top_p, min_p, mask": Case(
        msgspec.structs.replace(DRAWN, top_k=7, top_p=0.8, min_p=0.05), MASK
    ),
    "top_k=5, support": Case(msgspec.structs.replace(DRAWN, top_k=5), SUPPORT),
    "top_k=300, mask": Case(msgspec.structs.replace(DRAWN, top_k=300), MASK),
    "top_p=0.5, mask": Case(msgspec.structs.replace(DRAWN, top_p=0.5), MASK),
    "min_p=0.2, mask": Case(msgspec.structs.replace(DRAWN, min_p=0.2), MASK),
    "temperature, mask": Case(DRAWN, MASK),
}
EQUAL, UNEQUAL = 1e-5, 1e-3


def public(case: Case) -> dict[str, Any]:
    """The case as a request of SGLang's."""
    s = case.sampling
    params = {
        name: getattr(s, name)
        for name in (
            *("temperature", "top_p", "min_p", "ignore_eos"),
            *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"),
        )
    }
    params |= {"max_new_tokens": s.max_new_tokens, "top_k": s.top_k or -1}
    if s.stop_token_ids:
        params["stop_token_ids"] = list(s.stop_token_ids)
    return {"input_ids": PROMPT, "sampling_params": params, **case.fields}


def plain(model: Path, requests: Sequence[Mapping[str, Any]], **options: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """SGLang's answers to the requests, and to the rest of the greedy ones once resumed."""
    settings = {"model": str(model), **engine_options(**options)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang.plain_engine"],
        input=json.dumps({"settings": settings, "requests": requests, "n_kept": N_KEPT}) + "\n",
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers, resumed = json.loads(done.stdout.splitlines()[-1])
    return answers, resumed


def n_equal(one: Sequence[int], two: Sequence[int]) -> int:
    """Tokens before the first difference."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(two)))


def difference(one: Sequence[float], two: Sequence[float], n: int) -> float:
    """The largest of the first n."""
    return float(np.abs(np.array(one[:n]) - np.array(two[:n])).max(initial=0.0))


def of_support(answer: Mapping[str, Any]) -> list[float]:
    """The logprob of each token over what truncation left."""
    columns = (answer[name] for name in ("tokens", "masks", "support"))
    return [
        told[mask.index(token)] if isinstance(told, list) else told
        for token, mask, told in zip(*columns, strict=True)
    ]


async def run_ours(model: Path, options: Any, cases: Mapping[str, Case]) -> dict[str, Rollout]:  # noqa: ANN401
    async with rolloutbus.up(**fleet_of(model, **options)) as fleet:
        settings = ClientSettings(name="ours", router=fleet.address, overtime_s=DEADLINE_S)
        async with RolloutClient(settings) as client:
            return {
                name: await client.generate(PROMPT, case.sampling, deadline_s=DEADLINE_S)
                for name, case in cases.items()
            }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_overlapped", [False, True])
async def test_public_parameters_beside_ours(llama: Path, *, is_overlapped: bool) -> None:
    options = {"text": True, "disable_overlap_schedule": not is_overlapped}
    requests = [public(case) for case in CASES.values()]
    answers, rests = plain(llama, requests, **options)
    theirs, resumed = (dict(zip(CASES, each, strict=True)) for each in (answers, rests))
    # A refused request draws no random numbers: so that both draw the same, ours is not sent.
    accepted = {name: case for name, case in CASES.items() if "refused" not in theirs[name]}
    ours = await run_ours(llama, options, accepted)
    found: dict[str, dict[str, float]] = {}
    for name in CASES:
        if name not in accepted:
            print(f"{name:28} refused: {theirs[name]['refused'][:90]}")
            continue
        here, there = ours[name], theirs[name]
        n = n_equal(here.tokens.tolist(), there["tokens"])
        row = {
            "tokens": float(n),
            "of": float(len(here.tokens)),
            "logprobs": difference(here.logprobs.tolist(), there["logprobs"], n),
        }
        if there["masks"]:
            behaviour = here.behaviour_logprobs.tolist()
            row["behaviour"] = difference(behaviour, of_support(there), n)
        if resumed[name] is not None:
            rest, again = here.tokens.tolist()[N_KEPT:], resumed[name]
            n = n_equal(rest, again["tokens"])
            row |= {"resumed": float(n), "of rest": float(len(rest))}
            row["resumed logprobs"] = difference(
                here.logprobs.tolist()[N_KEPT:], again["logprobs"], n
            )
        print(f"{name:28}", {column: float(f"{value:.1e}") for column, value in row.items()})
        found[name] = row
    assert found["no penalty"]["logprobs"] < EQUAL
    assert found["no penalty"]["resumed logprobs"] < EQUAL
    # Why the hooks stay: a resumed request forgets, and these masks are refused.
    for name in ("frequency_penalty=0.5", "presence_penalty=0.4", "min_new_tokens=12"):
        row = found[name]
        assert row["resumed"] < row["of rest"] or row["resumed logprobs"] > UNEQUAL
    assert found["top_k=5, mask"]["behaviour"] < EQUAL
    refused = {"repetition_penalty=3", "top_p=0.5, mask", "min_p=0.2, mask", "temperature, mask"}
    assert refused.isdisjoint(accepted)
