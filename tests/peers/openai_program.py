"""A program on the packages `openai` and `litellm`; prints one JSON object of what it got.

`openai_program.py URL MODEL`, with the gateway's address and the name of its model.
"""

# pyright: basic, reportMissingImports=false
# What it imports is installed in the environment that runs it.

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would look on the web for prices

import litellm
import openai

litellm.suppress_debug_info = True  # on standard output
HELLO: Any = [{"role": "user", "content": "please hello"}]
WEATHER: Any = [{"role": "user", "content": "the weather"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def with_openai(url: str, model: str) -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": model, "temperature": 0}
    chat = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=2, **asked)
    rows = chat.choices[0].logprobs.content
    stream = client.chat.completions.create(messages=HELLO, stream=True, **asked)
    called = client.chat.completions.create(messages=WEATHER, tools=[TOOL], **asked)
    text = client.completions.create(prompt="hello", max_tokens=3, logprobs=1, **asked)
    return {
        "chat": chat.choices[0].message.content,
        "logprobs": [[each.logprob, len(each.top_logprobs)] for each in rows],
        "streamed": "".join(each.choices[0].delta.content or "" for each in stream if each.choices),
        "called": called.choices[0].message.tool_calls[0].function.name,
        "text": [text.choices[0].text, text.choices[0].logprobs.token_logprobs],
    }


async def with_openai_async(url: str, model: str) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=model, messages=HELLO, temperature=0, stream=True
        )
        pieces = [each.choices[0].delta.content or "" async for each in stream if each.choices]
        return "".join(pieces)


def with_litellm(url: str, model: str) -> dict[str, Any]:
    asked = {
        "model": f"openai/{model}",
        "base_url": f"{url}/v1",
        "api_key": "none",
        "temperature": 0,
    }
    whole = litellm.completion(messages=HELLO, **asked)
    stream = litellm.completion(messages=HELLO, stream=True, **asked)
    later = asyncio.run(litellm.acompletion(messages=HELLO, **asked))
    called = litellm.completion(messages=WEATHER, tools=[TOOL], **asked)
    return {
        "whole": whole.choices[0].message.content,
        "tokens": whole.usage.completion_tokens,
        "streamed": "".join(each.choices[0].delta.content or "" for each in stream),
        "later": later.choices[0].message.content,
        "called": called.choices[0].message.tool_calls[0].function.name,
        "refused": reason(lambda: litellm.completion(messages=HELLO, **{**asked, "top_p": 7})),
    }


def reason(call: Any) -> str:  # noqa: ANN401 - what is called is of no interest
    try:
        call()
    except litellm.BadRequestError as error:
        return str(error)
    return ""


def main() -> None:
    url, model = sys.argv[1:]
    told = {
        "openai": with_openai(url, model),
        "openai_async": asyncio.run(with_openai_async(url, model)),
        "litellm": with_litellm(url, model),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
