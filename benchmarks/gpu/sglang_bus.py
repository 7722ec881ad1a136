"""What does the bus cost an SGLang engine, and what do streams cost?

In one run, in turns, on one GPU: the same `sglang.Engine` called in its own process, and a worker
that is asked over the bus; without streams, and with every token of every request delivered to two
subscribers (the client that asked, and a process that only watches).

    python benchmarks/gpu/sglang_bus.py --shape 7b --json
"""

# pyright: reportUnknownMemberType=false

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import rolloutbus

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "kv_heads": 2},
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "layers": 24,
        "heads": 14,
        "kv_heads": 2,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "layers": 28,
        "heads": 28,
        "kv_heads": 4,
    },
}
VOCABULARY = {"tiny": 512, "0.5b": 151_936, "7b": 152_064}
DEADLINE_S = 400.0
END_S = 20.0
"""For a child that is told to end."""
HERE = Path(__file__).resolve().parent


CONTEXT_TOKENS = 4096


def write_shape(folder: Path, shape: str, context_tokens: int = CONTEXT_TOKENS) -> None:
    """A Qwen2 config of this shape and context; the engines make up its weights."""
    size = SHAPES[shape]
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY[shape],
        "hidden_size": size["hidden_size"],
        "intermediate_size": size["intermediate_size"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"],
        "max_position_embeddings": context_tokens,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def engine_options(device: str, slots: int, kv_tokens: int, memory: float = 0.75) -> dict[str, Any]:
    """Settings of an SGLang engine with made-up weights.

    Args:
        device: `cuda` or `cpu`.
        slots: requests at once.
        kv_tokens: that its cache has room for.
        memory: share of the GPU that it may take.
    """
    arguments: dict[str, object] = {"load_format": "dummy", "max_total_tokens": kv_tokens}
    if device == "cuda":
        arguments |= {
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "mem_fraction_static": memory,
            "cuda_graph_max_bs_decode": slots,
            "disable_prefill_cuda_graph": True,
        }
    return {
        "device": device,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "slots": slots,
        "arguments": arguments,
    }


def _engine_of(options: argparse.Namespace) -> dict[str, Any]:
    n_tokens = (options.prompt_tokens + options.new_tokens) * options.requests
    return engine_options(options.device, options.requests, int(n_tokens * 1.1) + 4096)


def prompts(options: argparse.Namespace, seed: int) -> list[list[int]]:
    """`--requests` prompts that share no beginning."""
    chance = random.Random(seed)
    top = VOCABULARY[options.shape]
    n = options.prompt_tokens
    return [[chance.randrange(3, top) for _ in range(n)] for _ in range(options.requests)]


class Child:
    """A program that answers one JSON line per JSON line."""

    def __init__(self, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which ends it
        )

    def ask(self, question: object) -> Any:  # noqa: ANN401 - JSON
        """Send one line and wait for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self._process.args} ended with {self._process.wait()}")

    def end(self) -> None:
        """Close its input, at which it ends; killed if it takes too long."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.asynccontextmanager
async def bus(
    options: argparse.Namespace, model: Path
) -> AsyncGenerator[tuple[rolloutbus.RolloutClient, Child]]:
    """A fleet of one worker, a client of it, and a watcher of that client's streams."""
    up = rolloutbus.up(model=model, workers=1, engine="sglang", engine_options=_engine_of(options))
    async with up as fleet, rolloutbus.connect(fleet.address, name="bench") as client:
        watcher = Child("stream_watcher.py", fleet.address, "bench")
        try:
            yield client, watcher
        finally:
            watcher.end()


async def bus_round(
    client: rolloutbus.RolloutClient, options: argparse.Namespace, seed: int, *, is_streamed: bool
) -> float:
    """Tokens per second of one salvo over the bus."""
    sampling = rolloutbus.SamplingParams(
        max_new_tokens=options.new_tokens, temperature=1.0, ignore_eos=True
    )

    async def one(prompt: list[int]) -> int:
        if not is_streamed:
            return len((await client.generate(prompt, sampling, deadline_s=DEADLINE_S)).tokens)
        n_tokens = 0
        async for delta in client.stream(prompt, sampling, deadline_s=DEADLINE_S):
            n_tokens += len(delta.tokens)
        return n_tokens

    began = time.perf_counter()
    counts = await asyncio.gather(*[one(prompt) for prompt in prompts(options, seed)])
    assert set(counts) == {options.new_tokens}, counts
    return sum(counts) / (time.perf_counter() - began)


async def first_token_s(
    client: rolloutbus.RolloutClient, options: argparse.Namespace, seed: int
) -> list[float]:
    """Seconds until the first token of requests that are alone."""
    sampling = rolloutbus.SamplingParams(max_new_tokens=4, temperature=1.0, ignore_eos=True)
    found: list[float] = []
    for prompt in prompts(options, seed)[: options.singles]:
        began = time.perf_counter()
        is_first = True
        async for _ in client.stream(prompt, sampling, deadline_s=DEADLINE_S):
            if is_first:
                found.append(time.perf_counter() - began)
            is_first = False
    return found


async def measure(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """All ways in turns."""
    plain = Child("in_process.py", str(model), json.dumps(_engine_of(options)))
    plain.ask({"kind": "hello"})
    _say("the engine in its own process is up")
    rates: dict[str, list[float]] = {}
    first: dict[str, list[float]] = {"in_process": [], "bus": []}
    try:
        async with bus(options, model) as (client, watcher):
            _say("the fleet is up")
            for number in range(options.rounds + 1):
                await _round(number, options, plain, (client, watcher), rates)
                _say(f"round {number}: " + ", ".join(f"{k} {v[-1]:.0f}" for k, v in rates.items()))
                if number == 0:
                    rates.clear()  # kernels are compiled and pools grown in the first one
                    continue
                asked = {
                    "kind": "first",
                    "prompts": prompts(options, 1000 + number)[: options.singles],
                }
                first["in_process"] += plain.ask(asked)["seconds"]
                first["bus"] += await first_token_s(client, options, 1000 + number)
    finally:
        plain.end()
    return _report(options, rates, first)


async def _round(
    number: int,
    options: argparse.Namespace,
    plain: Child,
    fleet: tuple[rolloutbus.RolloutClient, Child],
    rates: dict[str, list[float]],
) -> None:
    """One salvo of each kind on each side; what came first in one round comes last in the next."""
    client, watcher = fleet
    n_all = options.requests * options.new_tokens
    turns = [(kind, side) for kind in ("plain", "stream") for side in ("in_process", "bus")]
    for kind, side in turns if number % 2 else reversed(turns):
        is_streamed = kind == "stream"
        seed = 2 * number + is_streamed  # no prompt twice: a cached prefix is not computed again
        if side == "in_process":
            asked = {"kind": kind, "prompts": prompts(options, seed), "n": options.new_tokens}
            rate = (await asyncio.to_thread(plain.ask, asked))["tokens_per_s"]
        else:
            watcher.ask({"kind": "start"})
            rate = await bus_round(client, options, seed, is_streamed=is_streamed)
            seen = await asyncio.to_thread(watcher.ask, {"kind": "until", "n_tokens": n_all})
            if is_streamed:
                rates.setdefault("watcher_stream", []).append(seen["tokens_per_s"])
                rates.setdefault("watcher_rows", []).append(seen["n_rows"])
        rates.setdefault(f"{side}_{kind}", []).append(rate)


def _report(
    options: argparse.Namespace, rates: dict[str, list[float]], first: dict[str, list[float]]
) -> dict[str, Any]:
    middle = {name: statistics.median(found) for name, found in rates.items()}
    p50 = {name: statistics.median(found) for name, found in first.items()}

    def ratio(of: str, to: str) -> float:
        pairs = zip(rates[of], rates[to], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    return {
        "shape": options.shape,
        "requests": options.requests,
        "new_tokens": options.new_tokens,
        "tokens_per_s": {name: round(value) for name, value in middle.items()},
        "best_tokens_per_s": {name: round(max(found)) for name, found in rates.items()},
        "bus_to_in_process": ratio("bus_plain", "in_process_plain"),
        "streamed_to_two_to_plain": ratio("bus_stream", "bus_plain"),
        "watcher_to_plain": ratio("watcher_stream", "bus_plain"),
        "in_process_stream_to_plain": ratio("in_process_stream", "in_process_plain"),
        "first_token_p50_ms": {name: round(value * 1e3, 2) for name, value in p50.items()},
        "first_token_added_ms": round((p50["bus"] - p50["in_process"]) * 1e3, 2),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="An SGLang engine over the bus and without it")
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=384)
    parser.add_argument("--singles", type=int, default=20, help="requests for the first token")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="sglang-bus-") as folder:
        write_shape(Path(folder), options.shape)
        report = asyncio.run(measure(options, Path(folder)))
    print(json.dumps(report, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
