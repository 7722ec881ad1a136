"""A program on SkyRL's own remote client; prints one JSON object of what it got.

    python skyrl_program.py URL TOKEN [TOKEN …]

SkyRL's packages ask for Python 3.12, torch and Ray when they are imported. The client is a module
that needs none of them, so it is imported without what its packages do first.
"""

# pyright: basic, reportMissingImports=false
# What it imports is installed in the environment that runs it.

import asyncio
import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

PACKAGES = (
    "skyrl",
    "skyrl.backends",
    "skyrl.backends.skyrl_train",
    "skyrl.backends.skyrl_train.inference_servers",
)
LONG = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True}


def skyrl_client() -> Any:  # noqa: ANN401 - a class of a package without types
    """`RemoteInferenceClient`, as it is installed."""
    spec = importlib.util.find_spec("skyrl")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent.parent
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package
    return importlib.import_module(f"{PACKAGES[-1]}.remote_inference_client").RemoteInferenceClient


async def run(url: str, tokens: list[int]) -> dict[str, Any]:
    client = skyrl_client()(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="tiny"
    )
    told: dict[str, Any] = {"world_size": await client.get_world_size()}
    params = {"min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True}
    params |= {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    params |= {"logprobs": 1, "stop": None}
    told["generated"] = await client.generate(
        {
            "prompt_token_ids": [tokens] * 4,
            "sampling_params": params,
            "session_ids": ["a", "b", "c", "d"],
        }
    )
    sample = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]}}
    asked = {**sample, "num_samples": 2, "sampling_params": {"max_tokens": 3, "seed": 1}}
    told["sampled"] = await client.sample({"json": asked})
    messages = {"messages": [{"role": "user", "content": "please hello"}], "session_id": "a"}
    told["chat"] = await client.chat_completion({"json": dict(messages)})
    told["rendered"] = await client.render_chat_completion({"json": dict(messages)})
    text = await client.detokenize([tokens])
    told["tokens_again"] = await client.tokenize(text, add_special_tokens=False)
    for mode in ("keep", "wait", "abort"):
        running = asyncio.ensure_future(
            client.generate({"prompt_token_ids": [tokens], "sampling_params": LONG})
        )
        await asyncio.sleep(0.2)  # whether it runs by then or waits, it must end right
        await client.pause(mode)
        await client.resume()
        ended = await running
        told[mode] = [ended["stop_reasons"], len(ended["response_ids"][0])]
    await client.sleep(tags=["kv_cache"])
    await client.wake_up(tags=["kv_cache"])
    await client.reset_prefix_cache(reset_running_requests=True)
    await client.finish_session("a")
    try:
        await client.generate({"prompt_token_ids": [tokens], "sampling_params": {"max_tokns": 1}})
    except Exception as error:  # noqa: BLE001 - whatever it raises is what its users see
        told["wrong_parameter"] = str(error)
    await client.teardown()
    return told


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(sys.argv[1], [int(each) for each in sys.argv[2:]]))))
