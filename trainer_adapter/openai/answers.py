"""The choices of one request, whole or in pieces: a chat's and a completion's."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rolloutbus.bus.cut_characters import CUT
from rolloutbus.bus.wire.codec import AnyArray
from rolloutbus.trainer_adapter.client.core.results import Rollout
from rolloutbus.trainer_adapter.client.text import TextPieces, Tokenizer, text_until_stop
from rolloutbus.trainer_adapter.openai.answer_reader import AnswerPiece, Call
from rolloutbus.trainer_adapter.openai.bodies import (
    Body,
    ChatBody,
    CompletionBody,
    Json,
    trimmed_stops_of,
)
from rolloutbus.trainer_adapter.openai.formats import Reader
from rolloutbus.trainer_adapter.openai.token_bytes import token_bytes

TokenText = Callable[[int], str]
TokenBytes = Callable[[int, str], list[int] | None]
"""The bytes of a token of this text; None: they cannot be told."""

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
    """Tokens; each prompt counts once, and what was cached of it if its engine told."""
    step = max(len(rollouts) // n_prompts, 1)
    firsts = rollouts[::step]
    n_prompt = sum(rollout.n_prompt_tokens for rollout in firsts)
    n_new = sum(len(rollout.tokens) for rollout in rollouts)
    usage: Json = {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_new,
        "total_tokens": n_prompt + n_new,
    }
    cached = [_n_cached(rollout) for rollout in firsts if "cached_tokens" in rollout.arrays]
    if firsts and len(cached) == len(firsts):
        usage["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
    return usage


def _n_cached(rollout: Rollout) -> int:
    # An attempt that went on where another one ended may have found tokens of the answer, too.
    return min(int(rollout.arrays["cached_tokens"][0]), rollout.n_prompt_tokens)


def chat_logprobs(
    rollout: Rollout, text_of: TokenText, bytes_of: TokenBytes, *, has_ids: bool = False
) -> Json:
    """Logprobs of a chat choice: each token, and the likeliest if they were wanted.

    With `has_ids` a token is called `token_id:N`, since several may have the same text.
    """

    def entry(token: int, logprob: float) -> Json:
        text = text_of(token)
        name = _by_id(token) if has_ids else text
        return {"token": name, "logprob": logprob, "bytes": bytes_of(token, text)}

    told = zip(rollout.tokens.tolist(), _finite(rollout.logprobs), _likeliest(rollout), strict=True)
    content = [
        {
            **entry(token, logprob),
            "top_logprobs": [entry(other, value) for other, value in top],
        }
        for token, logprob, top in told
    ]
    return {"content": content}


def completion_logprobs(
    rollout: Rollout, text_of: TokenText, n_top: int, *, has_ids: bool = False
) -> Json:
    """Logprobs of a completion's choice, in columns; `has_ids` as of a chat's."""
    name_of = _by_id if has_ids else text_of
    names = [name_of(token) for token in rollout.tokens.tolist()]
    offsets: list[int] = []
    n_chars = 0
    for name in names:
        offsets.append(n_chars)
        n_chars += len(name)
    top = [{name_of(token): value for token, value in each} for each in _likeliest(rollout)]
    return {
        "tokens": names,
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


def _by_id(token: int) -> str:
    return f"token_id:{token}"


NewReader = Callable[[], Reader | None]
"""Makes a reader of one answer; None: all of it is content."""


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Token ids as the text of an answer."""

    tokenizer: Tokenizer
    special_ids: frozenset[int]
    skip_special: bool

    def of(self, tokens: Sequence[int]) -> str:
        """The text of an answer's tokens, without the special ones at its end."""
        n = len(tokens)
        while n and int(tokens[n - 1]) in self.special_ids:
            n -= 1
        ids = [int(token) for token in tokens[:n]]
        return str(self.tokenizer.decode(ids, skip_special_tokens=self.skip_special))

    def of_one(self, token: int) -> str:
        """The text of one token by itself."""
        return str(self.tokenizer.decode([token], skip_special_tokens=False))

    def bytes_of_one(self, token: int, text: str) -> list[int] | None:
        """The bytes of one token by itself, whose text is `text`; None: the tokenizer has none."""
        if CUT not in text:
            return list(text.encode())
        # Nothing else needs it, so a tokenizer may lack it.
        name_of = getattr(self.tokenizer, "convert_ids_to_tokens", None)
        return None if name_of is None else token_bytes(name_of(token), text)


class ChatAnswers:
    """The choices of a chat, whole or in pieces."""

    name = "chat.completion"
    """Type of the response; chunks of a chat have another one."""
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, body: ChatBody, texts: TokenTexts, new_reader: NewReader) -> None:
        self.body = body
        self.texts = texts
        self.new_reader = new_reader
        self.stop = trimmed_stops_of(body)
        self.min_tokens = body.min_tokens or 0

    def choice(self, index: int, rollout: Rollout) -> Json:
        """A whole choice."""
        tokens = rollout.tokens.tolist()
        text = text_until_stop(self.texts.of, tokens, self.stop, self.min_tokens)
        reader = self.new_reader()
        read: Iterable[AnswerPiece | Call] = [AnswerPiece("content", text)]
        if reader is not None:
            read = [*reader.feed(text), *reader.end()]
        message = message_of(read)
        return {
            "index": index,
            "message": message,
            **self.end_of(rollout, calls_tools="tool_calls" in message),
        }

    def stream(self, index: int) -> "ChatStream":
        """A choice in pieces."""
        return ChatStream(self, index)

    def end_of(self, rollout: Rollout, *, calls_tools: bool) -> Json:
        """What is known of a choice at its end."""
        logprobs = None
        if self.body.logprobs:
            has_ids = bool(self.body.return_tokens_as_token_ids)
            logprobs = chat_logprobs(
                rollout, self.texts.of_one, self.texts.bytes_of_one, has_ids=has_ids
            )
        return {
            "finish_reason": finish_of(rollout.finish_reason, calls_tools=calls_tools),
            "logprobs": logprobs,
            **extras_of(rollout, has_tokens=bool(self.body.return_token_ids)),
        }


class ChatStream:
    """One choice of a chat on its way."""

    def __init__(self, answers: ChatAnswers, index: int) -> None:
        self._answers = answers
        self._index = index
        self._pieces = TextPieces(answers.texts.of, answers.stop, answers.min_tokens)
        self._reader = answers.new_reader()
        self._n_calls = 0

    def opening(self) -> Json:
        """The choice of its first chunk."""
        return self._choice({"role": "assistant", "content": ""})

    def add(self, start: int, tokens: Sequence[int], *, is_last: bool) -> list[Json]:
        """Choices of the chunks that these tokens make."""
        text = self._pieces.add(start, tokens, is_last=is_last)
        if self._reader is None:
            return [self._choice({"content": text})] if text else []
        read = self._reader.feed(text)
        if is_last:
            read += self._reader.end()
        return [self._choice(self._delta(each)) for each in read]

    def closing(self, rollout: Rollout) -> Json:
        """The choice of its last chunk."""
        calls_tools = self._n_calls > 0
        return {**self._choice({}), **self._answers.end_of(rollout, calls_tools=calls_tools)}

    def _delta(self, read: AnswerPiece | Call) -> Json:
        if isinstance(read, AnswerPiece):
            return {"content" if read.kind == "content" else "reasoning_content": read.text}
        self._n_calls += 1
        return {"tool_calls": [{"index": self._n_calls - 1, **call_of(read)}]}

    def _choice(self, delta: Json) -> Json:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}


class CompletionAnswers:
    """The choices of a completion, whole or in pieces."""

    name = chunk_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, body: CompletionBody, texts: TokenTexts, echoed: Sequence[str]) -> None:
        self.body = body
        self.texts = texts
        self.stop = trimmed_stops_of(body)
        self.min_tokens = body.min_tokens or 0
        self._echoed = echoed

    def echo(self, index: int) -> str:
        """What a choice begins with: its prompt, if that was asked for."""
        return self._echoed[index // (self.body.n or 1)]

    def choice(self, index: int, rollout: Rollout) -> Json:
        """A whole choice."""
        tokens = rollout.tokens.tolist()
        text = text_until_stop(self.texts.of, tokens, self.stop, self.min_tokens)
        return {"index": index, "text": self.echo(index) + text, **self.end_of(rollout)}

    def stream(self, index: int) -> "CompletionStream":
        """A choice in pieces."""
        return CompletionStream(self, index)

    def end_of(self, rollout: Rollout) -> Json:
        """What is known of a choice at its end."""
        n_top = self.body.logprobs
        logprobs = None
        if n_top is not None:
            has_ids = bool(self.body.return_tokens_as_token_ids)
            logprobs = completion_logprobs(rollout, self.texts.of_one, n_top, has_ids=has_ids)
        return {
            "finish_reason": rollout.finish_reason,
            "logprobs": logprobs,
            **extras_of(rollout, has_tokens=bool(self.body.return_token_ids)),
        }


class CompletionStream:
    """One choice of a completion on its way."""

    def __init__(self, answers: CompletionAnswers, index: int) -> None:
        self._answers = answers
        self._index = index
        self._pieces = TextPieces(answers.texts.of, answers.stop, answers.min_tokens)

    def opening(self) -> Json:
        """The choice of its first chunk."""
        return self._choice(self._answers.echo(self._index))

    def add(self, start: int, tokens: Sequence[int], *, is_last: bool) -> list[Json]:
        """Choices of the chunks that these tokens make."""
        text = self._pieces.add(start, tokens, is_last=is_last)
        return [self._choice(text)] if text else []

    def closing(self, rollout: Rollout) -> Json:
        """The choice of its last chunk."""
        return {**self._choice(""), **self._answers.end_of(rollout)}

    def _choice(self, text: str) -> Json:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}


def token_texts(body: Body, tokenizer: Tokenizer, special_ids: Sequence[int]) -> TokenTexts:
    """As a body wants its answers."""
    return TokenTexts(tokenizer, frozenset(special_ids), body.skip_special_tokens)


Answers = ChatAnswers | CompletionAnswers
"""Formats the choices of a request, for a chat or for a completion."""
