"""Rollouts as choices of a response: text, reasons, logprobs, counts."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rolloutbus.bus.wire.arrays import AnyArray
from rolloutbus.trainer_adapter.client.rollout import Rollout
from rolloutbus.trainer_adapter.openai.answer_reader import AnswerPiece, Call
from rolloutbus.trainer_adapter.openai.bodies import Json

TokenText = Callable[[int], str]

NEVER = -9999.0
"""OpenAI's logprob of what cannot be sampled."""


def message_of(read: Iterable[AnswerPiece | Call]) -> Json:
    """An assistant's message."""
    content = reasoning = ""
    calls: list[Json] = []
    for each in read:
        if isinstance(each, Call):
            calls.append(call_of(each))
        elif each.kind == "content":
            content += each.text
        else:
            reasoning += each.text
    message: Json = {"role": "assistant", "content": content}
    if calls:
        message |= {"content": content.strip() or None, "tool_calls": calls}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def call_of(call: Call) -> Json:
    """A tool call."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def finish_of(reason: str, *, calls_tools: bool) -> str:
    """Why an answer ended, in OpenAI's words."""
    return "tool_calls" if calls_tools and reason == "stop" else reason


def extras_of(rollout: Rollout, *, has_tokens: bool) -> Json:
    """What a trainer wants to know of a choice, beyond OpenAI's fields."""
    extras: Json = {
        "weight_versions": [list(run) for run in rollout.version_runs],
        "rid": rollout.rid,
        "worker": rollout.worker,
    }
    if rollout.lora:
        extras["lora"] = rollout.lora
    if has_tokens:
        extras["token_ids"] = rollout.tokens.tolist()
    return extras


def usage_of(rollouts: Sequence[Rollout], n_prompts: int = 1) -> Json:
    """Tokens; each prompt counts once."""
    step = max(len(rollouts) // n_prompts, 1)
    n_prompt = sum(rollout.n_prompt_tokens for rollout in rollouts[::step])
    n_new = sum(len(rollout.tokens) for rollout in rollouts)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_new,
        "total_tokens": n_prompt + n_new,
    }


def chat_logprobs(rollout: Rollout, text_of: TokenText) -> Json:
    """Logprobs of a chat choice: each token, and the likeliest if they were wanted."""
    told = zip(rollout.tokens.tolist(), _finite(rollout.logprobs), _likeliest(rollout), strict=True)
    content = [
        {
            **_named(token, logprob, text_of),
            "top_logprobs": [_named(other, value, text_of) for other, value in top],
        }
        for token, logprob, top in told
    ]
    return {"content": content}


def completion_logprobs(rollout: Rollout, text_of: TokenText, n_top: int) -> Json:
    """Logprobs of a completion's choice, in columns."""
    texts = [text_of(token) for token in rollout.tokens.tolist()]
    offsets: list[int] = []
    n_chars = 0
    for text in texts:
        offsets.append(n_chars)
        n_chars += len(text)
    top = [{text_of(token): value for token, value in each} for each in _likeliest(rollout)]
    return {
        "tokens": texts,
        "token_logprobs": _finite(rollout.logprobs),
        "top_logprobs": top if n_top else None,
        "text_offset": offsets,
    }


def _likeliest(rollout: Rollout) -> list[list[tuple[int, float]]]:
    """(token, logprob) in each place; none for tokens kept from an earlier attempt."""
    ids, values = rollout.arrays.get("top_token_ids"), rollout.arrays.get("top_logprobs")
    if ids is None or values is None:
        return [[] for _ in rollout.tokens]
    known: list[list[tuple[int, float]]] = [
        list(zip(row, logprobs, strict=True))
        for row, logprobs in zip(ids.tolist(), map(_finite, values), strict=True)
    ]
    nothing: list[tuple[int, float]] = []
    return [nothing] * (len(rollout.tokens) - len(known)) + known


def _finite(logprobs: AnyArray) -> list[float]:
    """JSON has no infinity."""
    return np.maximum(logprobs, NEVER).tolist()


def _named(token: int, logprob: float, text_of: TokenText) -> dict[str, Any]:
    text = text_of(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
