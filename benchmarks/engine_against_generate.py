"""The transformers engine behind the bus against `transformers.generate`: tokens per CPU second.

Both sample the same batches of the tiny model, in turns in one run, with one thread, the same
sampling, and the logprob of each token. `generate` runs in this process, the engine as a worker of
a fleet; CPU time is compared, which other work on the machine changes less than rates.

    python -m benchmarks.engine_against_generate --json
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch
import uvloop

import rolloutbus
from benchmarks.command_path import count
from benchmarks.gateway_rates import cpu_s_of
from benchmarks.side_processes import machine
from rolloutbus import Fleet, RolloutClient, SamplingParams
from rolloutbus.examples.task import ALPHABET, prompt_tokens
from rolloutbus.examples.tiny_model import build_tiny_model, load_tiny_model

Json = dict[str, Any]

BATCHES = (8, 16, 32, 64)
N_TOKENS = 96
N_LETTERS = 8
SAMPLING = SamplingParams(max_new_tokens=N_TOKENS, ignore_eos=True)
GOAL = 0.9
WORKER = "w0"


def _prompts(n_rows: int, turn: int) -> list[list[int]]:
    """All different, of one length, and new in each turn, so that no prefix is cached."""
    n = len(ALPHABET)
    found: list[list[int]] = []
    for row in range(n_rows):
        number = turn * n_rows + row
        word = "".join(ALPHABET[number // n**i % n] for i in range(N_LETTERS))
        found.append(prompt_tokens(word))
    return found


@torch.inference_mode()
def _generated(model: Any, prompts: list[list[int]]) -> int:  # noqa: ANN401 - untyped
    """Tokens that `generate` samples, each with its logprob."""
    ids = torch.tensor(prompts)
    told = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=N_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = told.sequences[:, ids.shape[1] :]
    logprobs = torch.log_softmax(torch.stack(told.logits, 1).float(), -1)
    chosen = logprobs.gather(2, tokens[:, :, None]).numpy()
    assert chosen.shape[:2] == (len(prompts), N_TOKENS)
    return int(tokens.numel())


async def _rolled_out(client: RolloutClient, prompts: list[list[int]]) -> int:
    """Tokens that the fleet samples; a rollout always has their logprobs."""
    groups = await client.generate_batch(prompts, SAMPLING)
    rollouts = [rollout for group in groups for rollout in group]
    assert all(len(each.logprobs) == N_TOKENS for each in rollouts)
    return sum(len(each.tokens) for each in rollouts)


async def _turn(fleet: Fleet, client: RolloutClient, model: object, n_rows: int, turn: int) -> Json:
    """Microseconds of CPU and of wall time for each token, both ways."""
    prompts = _prompts(n_rows, turn)
    n_tokens = n_rows * N_TOKENS
    begun_at, cpu = time.perf_counter(), time.process_time()
    assert _generated(model, prompts) == n_tokens
    own = {"wall": time.perf_counter() - begun_at, "cpu": time.process_time() - cpu}
    engines, others = fleet.host_pids(WORKER), list(fleet.pids.values())
    begun_at, cpu = time.perf_counter(), time.process_time()
    before = [sum(map(cpu_s_of, pids)) for pids in (engines, others)]
    assert await _rolled_out(client, prompts) == n_tokens
    after = [sum(map(cpu_s_of, pids)) for pids in (engines, others)]
    client_s, wall_s = time.process_time() - cpu, time.perf_counter() - begun_at
    engine_s = after[0] - before[0]
    all_s = engine_s + after[1] - before[1] + client_s
    bus = {"wall": wall_s, "engine": engine_s, "all": all_s}
    seen = {f"generate_{name}": value for name, value in own.items()}
    seen |= {f"bus_{name}": value for name, value in bus.items()}
    return {name: 1e6 * value / n_tokens for name, value in seen.items()}


def _row(n_rows: int, turns: list[Json]) -> Json:
    """Medians; ratios are of tokens per second, so that more is better for the bus."""

    def ratio(ours: str, theirs: str) -> float:
        return round(statistics.median(turn[theirs] / turn[ours] for turn in turns), 3)

    microseconds = {
        name: round(statistics.median(turn[name] for turn in turns), 2) for name in turns[0]
    }
    return {
        "rows": n_rows,
        "us_per_token": microseconds,
        "engine_ratio": ratio("bus_engine", "generate_cpu"),
        "all_ratio": ratio("bus_all", "generate_cpu"),
        "wall_ratio": ratio("bus_wall", "generate_wall"),
    }


async def _measured(options: argparse.Namespace) -> Json:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rb-") as directory:
        path = Path(directory)
        build_tiny_model(path, seed=0)
        model = cast("Any", load_tiny_model(path)).eval()
        slots = {"threads": 1, "slots": max(options.rows)}
        async with (
            rolloutbus.up(model=path, workers=1, store=False, engine_options=slots) as fleet,
            rolloutbus.connect(fleet.address, name="benchmark") as client,
        ):
            seen: dict[int, list[Json]] = {n_rows: [] for n_rows in options.rows}
            for turn in range(options.rounds + 1):
                for n_rows, turns in seen.items():
                    turns.append(await _turn(fleet, client, model, n_rows, turn))
    rows = [_row(n_rows, turns[1:]) for n_rows, turns in seen.items()]  # the first warms up
    return {"rows": rows, "goal": GOAL, "machine": machine()}


def _table(report: Json) -> str:
    return "\n".join(
        f"{row['rows']:3} rows: engine {row['engine_ratio']:.2f} of generate's tokens per CPU "
        f"second, with all processes {row['all_ratio']:.2f}, in wall time {row['wall_ratio']:.2f}; "
        f"CPU us a token {row['us_per_token']}"
        for row in report["rows"]
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The transformers engine, and generate.")
    parser.add_argument("--rows", type=count, nargs="+", default=BATCHES, help="of a batch")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    report = uvloop.run(_measured(options))
    print(json.dumps(report) if options.json else _table(report))


if __name__ == "__main__":
    main()
