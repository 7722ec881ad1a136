"""The choices of one request, whole or in pieces: a chat's and a completion's."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rolloutbus.trainer_adapter.client.rollout import Rollout
from rolloutbus.trainer_adapter.client.text import Tokenizer
from rolloutbus.trainer_adapter.client.text_pieces import TextPieces, without_stop
from rolloutbus.trainer_adapter.openai.answer_reader import AnswerPiece, AnswerReader, Call
from rolloutbus.trainer_adapter.openai.bodies import Body, ChatBody, CompletionBody, Json, texts_in
from rolloutbus.trainer_adapter.openai.choices import (
    call_of,
    chat_logprobs,
    completion_logprobs,
    extras_of,
    finish_of,
    message_of,
)

NewReader = Callable[[], AnswerReader | None]
"""Makes a reader of one answer; None: all of it is content."""


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Token ids as the text of an answer."""

    tokenizer: Tokenizer
    special_ids: frozenset[int]
    skip_special: bool

    def of(self, tokens: Sequence[int]) -> str:
        """Without special tokens at its end, whatever else is kept."""
        n = len(tokens)
        while n and int(tokens[n - 1]) in self.special_ids:
            n -= 1
        ids = [int(token) for token in tokens[:n]]
        return str(self.tokenizer.decode(ids, skip_special_tokens=self.skip_special))

    def of_one(self, token: int) -> str:
        """Any token by itself."""
        return str(self.tokenizer.decode([token], skip_special_tokens=False))


class ChoiceStream(Protocol):
    """One choice on its way."""

    def opening(self) -> Json:
        """The choice of its first chunk."""
        ...

    def add(self, start: int, tokens: Sequence[int], *, is_last: bool) -> list[Json]:
        """Choices of the chunks that these tokens make."""
        ...

    def closing(self, rollout: Rollout) -> Json:
        """The choice of its last chunk."""
        ...


class Answers(Protocol):
    """How the choices of a request are told."""

    name: str
    """Type of the response; chunks of a chat have another one."""
    chunk_name: str
    id_prefix: str

    def choice(self, index: int, rollout: Rollout) -> Json:
        """A whole choice."""
        ...

    def stream(self, index: int) -> ChoiceStream:
        """A choice in pieces."""
        ...


class ChatAnswers:
    """Implements `Answers` for chats."""

    name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, body: ChatBody, texts: TokenTexts, new_reader: NewReader) -> None:
        self.body = body
        self.texts = texts
        self.new_reader = new_reader
        self.stop = texts_in(body.stop)

    def choice(self, index: int, rollout: Rollout) -> Json:
        """See `Answers`."""
        text = without_stop(self.texts.of(rollout.tokens.tolist()), self.stop)
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

    def stream(self, index: int) -> ChoiceStream:
        """See `Answers`."""
        return _ChatStream(self, index)

    def end_of(self, rollout: Rollout, *, calls_tools: bool) -> Json:
        """What is known of a choice at its end."""
        logprobs = chat_logprobs(rollout, self.texts.of_one) if self.body.logprobs else None
        return {
            "finish_reason": finish_of(rollout.finish_reason, calls_tools=calls_tools),
            "logprobs": logprobs,
            **extras_of(rollout, has_tokens=bool(self.body.return_token_ids)),
        }


class _ChatStream:
    def __init__(self, answers: ChatAnswers, index: int) -> None:
        self._answers = answers
        self._index = index
        self._pieces = TextPieces(answers.texts.of, answers.stop)
        self._reader = answers.new_reader()
        self._n_calls = 0

    def opening(self) -> Json:
        return self._choice({"role": "assistant", "content": ""})

    def add(self, start: int, tokens: Sequence[int], *, is_last: bool) -> list[Json]:
        text = self._pieces.add(start, tokens, is_last=is_last)
        if self._reader is None:
            return [self._choice({"content": text})] if text else []
        read = self._reader.feed(text)
        if is_last:
            read += self._reader.end()
        return [self._choice(self._delta(each)) for each in read]

    def closing(self, rollout: Rollout) -> Json:
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
    """Implements `Answers` for completions."""

    name = chunk_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, body: CompletionBody, texts: TokenTexts, echoed: Sequence[str]) -> None:
        self.body = body
        self.texts = texts
        self.stop = texts_in(body.stop)
        self._echoed = echoed

    def echo(self, index: int) -> str:
        """What a choice begins with: its prompt, if that was asked for."""
        return self._echoed[index // (self.body.n or 1)]

    def choice(self, index: int, rollout: Rollout) -> Json:
        """See `Answers`."""
        text = without_stop(self.texts.of(rollout.tokens.tolist()), self.stop)
        return {"index": index, "text": self.echo(index) + text, **self.end_of(rollout)}

    def stream(self, index: int) -> ChoiceStream:
        """See `Answers`."""
        return _CompletionStream(self, index)

    def end_of(self, rollout: Rollout) -> Json:
        """What is known of a choice at its end."""
        n_top = self.body.logprobs
        logprobs = None
        if n_top is not None:
            logprobs = completion_logprobs(rollout, self.texts.of_one, n_top)
        return {
            "finish_reason": rollout.finish_reason,
            "logprobs": logprobs,
            **extras_of(rollout, has_tokens=bool(self.body.return_token_ids)),
        }


class _CompletionStream:
    def __init__(self, answers: CompletionAnswers, index: int) -> None:
        self._answers = answers
        self._index = index
        self._pieces = TextPieces(answers.texts.of, answers.stop)

    def opening(self) -> Json:
        return self._choice(self._answers.echo(self._index))

    def add(self, start: int, tokens: Sequence[int], *, is_last: bool) -> list[Json]:
        text = self._pieces.add(start, tokens, is_last=is_last)
        return [self._choice(text)] if text else []

    def closing(self, rollout: Rollout) -> Json:
        return {**self._choice(""), **self._answers.end_of(rollout)}

    def _choice(self, text: str) -> Json:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}


def token_texts(body: Body, tokenizer: Tokenizer, special_ids: Sequence[int]) -> TokenTexts:
    """As a body wants its answers."""
    return TokenTexts(tokenizer, frozenset(special_ids), body.skip_special_tokens)
