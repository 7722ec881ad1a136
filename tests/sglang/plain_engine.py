"""A plain `sglang.Engine`, of which nothing is patched, asked through its public parameters.

`python -m tests.sglang.plain_engine`: one line of JSON in, the engine's settings and requests; one
line out, its answers.
"""

import asyncio
import json
import sys
from typing import Any

from rolloutbus.engine_worker.engines.sglang.rendezvous import RendezvousPort
from rolloutbus.engine_worker.engines.sglang.settings import SglangSettings
from rolloutbus.engine_worker.engines.sglang.upstream import names as upstream
from rolloutbus.engine_worker.engines.sglang.upstream.arguments import server_arguments


def main() -> None:
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    out, sys.stdout = sys.stdout, sys.stderr  # SGLang prints
    settings = SglangSettings(**order["settings"])
    arguments = server_arguments(settings, upstream.server_argument_types())
    port = RendezvousPort()
    arguments["nccl_port"] = port.number
    engine: Any = upstream.build_engine(upstream.run_scheduler_process, arguments)
    try:
        answers = [_answer(engine, request) for request in order["requests"]]
        resumed = [
            _resumed(engine, *each, order["n_kept"])
            for each in zip(order["requests"], answers, strict=True)
        ]
    finally:
        engine.shutdown()
    out.write(json.dumps([answers, resumed]) + "\n")


def _answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    try:
        asked = upstream.request("GenerateReqInput", return_logprob=True, **request)
        output = engine.loop.run_until_complete(asyncio.wait_for(_last(engine, asked), 60))
    except Exception as error:  # noqa: BLE001 - what it refuses is a result
        return {"refused": f"{type(error).__name__}: {error}"}
    meta = output["meta_info"]
    reason: dict[str, Any] = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        return {"refused": str(reason.get("message"))}
    rows: list[Any] = meta["output_token_logprobs"]
    return {
        "tokens": [row[1] for row in rows],
        "logprobs": [row[0] for row in rows],
        "masks": meta.get("output_token_sampling_mask"),
        "support": meta.get("output_token_sampling_logprobs"),
    }


def _resumed(
    engine: Any,  # noqa: ANN401
    request: dict[str, Any],
    answer: dict[str, Any],
    n_kept: int,
) -> dict[str, Any] | None:
    """The answer to the rest of a greedy request, whose first tokens belong to the prompt then."""
    params = request["sampling_params"]
    if "refused" in answer or params["temperature"]:
        return None
    params = {**params, "max_new_tokens": params["max_new_tokens"] - n_kept}
    prompt = [*request["input_ids"], *answer["tokens"][:n_kept]]
    return _answer(engine, {**request, "input_ids": prompt, "sampling_params": params})


async def _last(engine: Any, asked: object) -> Any:  # noqa: ANN401
    last: Any = None
    async for output in engine.tokenizer_manager.generate_request(asked, None):
        last = output
    return last


if __name__ == "__main__":
    main()
