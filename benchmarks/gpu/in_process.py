"""What `sglang_bus.py` and `fleet.py` compare with: SGLang as its users call it, in one process.

Reads one JSON line per task from standard input and answers with one on standard output.
"""

import asyncio
import importlib
import json
import sys
import time
from typing import Any

from rolloutbus.engine_worker.engines.sglang.settings import SglangSettings
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.arguments import server_arguments


def sampling(n_tokens: int) -> dict[str, object]:
    """As over the bus."""
    return {"max_new_tokens": n_tokens, "temperature": 1.0, "ignore_eos": True}


async def plain(engine: Any, prompts: list[list[int]], n_tokens: int) -> int:  # noqa: ANN401
    """Tokens of a salvo without streams."""
    asked = [
        engine.async_generate(
            input_ids=prompt, sampling_params=sampling(n_tokens), return_logprob=True
        )
        for prompt in prompts
    ]
    return sum(len(output["output_ids"]) for output in await asyncio.gather(*asked))


async def stream(engine: Any, prompts: list[list[int]], n_tokens: int) -> int:  # noqa: ANN401
    """Tokens of a salvo, each one streamed with its logprob."""

    async def one(prompt: list[int]) -> int:
        chunks = await engine.async_generate(
            input_ids=prompt,
            sampling_params=sampling(n_tokens),
            return_logprob=True,
            stream=True,
        )
        n_seen = 0
        async for chunk in chunks:
            n_seen += len(chunk["output_ids"])
        return n_seen

    return sum(await asyncio.gather(*[one(prompt) for prompt in prompts]))


async def first(engine: Any, prompts: list[list[int]]) -> list[float]:  # noqa: ANN401
    """Seconds until the first token of requests that are alone."""
    found: list[float] = []
    for prompt in prompts:
        began = time.perf_counter()
        chunks = await engine.async_generate(
            input_ids=prompt, sampling_params=sampling(4), return_logprob=True, stream=True
        )
        n_seen = 0
        async for _ in chunks:
            if not n_seen:
                found.append(time.perf_counter() - began)
            n_seen += 1
    return found


async def serve(engine: Any) -> None:  # noqa: ANN401
    """Do what is asked until the input ends."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        answer: dict[str, object] = {}
        began = time.perf_counter()
        match asked["kind"]:
            case "plain":
                n_tokens = await plain(engine, asked["prompts"], asked["n"])
                seconds = time.perf_counter() - began
                answer = {"n_tokens": n_tokens, "tokens_per_s": n_tokens / seconds}
            case "stream":
                n_tokens = await stream(engine, asked["prompts"], asked["n"])
                seconds = time.perf_counter() - began
                answer = {"n_tokens": n_tokens, "tokens_per_s": n_tokens / seconds}
            case "first":
                answer = {"seconds": await first(engine, asked["prompts"])}
            case _:
                pass
        print(json.dumps(answer), flush=True)


def main() -> None:
    """Start the engine and serve."""
    model, options = sys.argv[1], json.loads(sys.argv[2])
    arguments = options.pop("arguments")
    settings = SglangSettings(model=model, arguments=arguments, **options)
    chosen = server_arguments(settings, upstream.server_argument_types())
    engine: Any = importlib.import_module("sglang").Engine(
        **chosen, incremental_streaming_output=True
    )
    engine.loop.run_until_complete(serve(engine))


if __name__ == "__main__":
    main()
