"""Calls of one tool as several models write them: one, and two in a row."""

import json
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
ARGUMENTS = {"city": 'Köln; "am Rhein"', "days": 3}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
BAR = "\N{FULLWIDTH VERTICAL LINE}"


def deepseek(name: str) -> str:
    return f"<{BAR}{name}{BAR}>"


ONE: dict[str, str] = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>',
    "llama3": f'{{"name": "get_weather", "parameters": {JSON}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}}}]',
    "mistral-args": f"[TOOL_CALLS]get_weather[ARGS]{JSON}",
    "deepseek-v3": f"{deepseek('tool▁calls▁begin')}{deepseek('tool▁call▁begin')}function"
    f"{deepseek('tool▁sep')}get_weather\n```json\n{JSON}\n```{deepseek('tool▁call▁end')}"
    f"{deepseek('tool▁calls▁end')}",
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "qwen3-coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\n"
    f"{ARGUMENTS['city']}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm-4.5": "<tool_call>get_weather\n<arg_key>city</arg_key>\n"
    f"<arg_value>{ARGUMENTS['city']}</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
}
ONE["qwen"] = ONE["hermes"]
TWO = {name: f"{text}\n{text}" for name, text in ONE.items()}
TWO["llama3"] = f"{ONE['llama3']}; {ONE['llama3']}"
TWO["mistral"] = f"[TOOL_CALLS] [{', '.join(2 * [ONE['mistral'].partition(' [')[2][:-1]])}]"
