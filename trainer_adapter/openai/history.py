"""Prompts of conversations that go on: sampled tokens stay in them as they were sampled.

A chat template renders text. The text of an answer, encoded again, need not give the tokens that
were sampled: so these are kept, and only what follows them is rendered and encoded.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from rolloutbus.trainer_adapter.client.core.results import Int32s
from rolloutbus.trainer_adapter.client.text import Tokenizer
from rolloutbus.trainer_adapter.openai.after_answers import AfterAnswers, Render
from rolloutbus.trainer_adapter.openai.bodies import ChatBody, Json, refusal, unsupported

MAX_TOKENS = 32 * 1024 * 1024
"""Of all conversations that are remembered: 128 MiB."""
MAX_TOKEN = 2**31 - 1
OWN_TOKENS = "token_ids"
"""Field of an assistant's message: its tokens, for those who keep them themselves."""
Key = bytes


class Transcripts:
    """Tokens of conversations, up to some answer each; the least recently used are forgotten."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._kept: OrderedDict[Key, tuple[Key | None, Int32s]] = OrderedDict()
        """Key -> the conversation that it goes on with, and its own tokens."""
        self._n_tokens = 0

    def find(self, key: Key) -> list[int] | None:
        """All tokens of a conversation; None: it was never kept, or is forgotten."""
        parts: list[Int32s] = []
        at: Key | None = key
        while at is not None:
            kept = self._kept.get(at)
            if kept is None:
                return None
            self._kept.move_to_end(at)  # the first turns of all come last: others need them
            at, own = kept
            parts.append(own)
        return np.concatenate(parts[::-1]).tolist()

    def keep(self, key: Key, tokens: Sequence[int], parent: Key | None, n_parent: int) -> None:
        """Remember a conversation; its first `n_parent` tokens were those of `parent`.

        If another one that reads alike is remembered, it takes the place of that one, and what went
        on from that one keeps its tokens.
        """
        if key == parent:
            return
        if parent is not None and self.find(parent) != [*tokens[:n_parent]]:
            parent, n_parent = None, 0  # it is forgotten, or another one that reads alike is there
        own = np.asarray(tokens[n_parent:], np.int32)
        former = self._kept.get(key)
        if former is not None and (former[0] != parent or not np.array_equal(former[1], own)):
            self._hand_down(key, *former)
        self._forget(key)
        self._kept[key] = parent, own
        self._n_tokens += len(own)
        self.find(key)  # what it goes on from is to be forgotten after it
        while self._n_tokens > self._max_tokens:
            self._forget(next(iter(self._kept)))

    def _hand_down(self, key: Key, parent: Key | None, tokens: Int32s) -> None:
        """Give the tokens of a conversation to those that go on from it."""
        for each, (goes_on_from, own) in [*self._kept.items()]:
            if goes_on_from == key:
                self._kept[each] = parent, np.concatenate([tokens, own])
                self._n_tokens += len(tokens)

    def _forget(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        self._n_tokens -= len(kept[1]) if kept is not None else 0


@dataclass(frozen=True, slots=True)
class Continued:
    """A prompt."""

    tokens: list[int]
    n_kept: int = 0
    """Its first tokens, which are those of an earlier answer and what stood before it."""
    parent: Key | None = None
    """Where they were remembered."""


class ExactConversation:
    """Messages that may go on after answers whose tokens are known."""

    def __init__(
        self,
        body: ChatBody,
        messages: Sequence[Json],
        tokenizer: Tokenizer,
        special_ids: Sequence[int],
        render: Callable[..., str],
    ) -> None:
        """Nothing is rendered yet.

        Args:
            body: whose `session_id` says which conversations belong together.
            messages: as the template takes them.
            tokenizer: whose tokens are sampled.
            special_ids: tokens that are no text.
            render: messages and flags of the template as text.
        """
        self._messages = [
            {name: value for name, value in each.items() if name != OWN_TOKENS} for each in messages
        ]
        self._told = [_told_tokens(each, i) for i, each in enumerate(messages)]
        self._tokenizer = tokenizer
        self._render = render
        self._after = AfterAnswers(tokenizer, special_ids, self._ended)
        self._continues_last = body.continue_final_message
        self.keys = _keys(body) if body.session_id is not None else None
        """Of the conversation up to each message, and of the one without any."""

    def prompt(self, text: str, render: Render, transcripts: Transcripts) -> Continued:
        """Token ids of all messages.

        Args:
            text: all messages, rendered.
            render: how `text` was rendered.
            transcripts: of earlier answers.

        Raises:
            Refused: the template writes earlier turns otherwise when a conversation goes on.
        """
        n_last = len(self._messages) - self._continues_last
        return self._prompt(len(self._messages), n_last, text, render, transcripts)

    def key_after(self, message: Json) -> Key | None:
        """Of the conversation with this answer; None: it belongs to no session."""
        return _next_key(self.keys[-1], message) if self.keys is not None else None

    def _prompt(
        self, n: int, n_last: int, text: str, render: Render, transcripts: Transcripts
    ) -> Continued:
        for i in reversed(range(n_last)):
            before = self._through(i, transcripts)
            if before is not None:
                messages, last = self._messages[:n], before.tokens[-1]
                more = self._after.tokens(messages, i, text, render, last)
                return Continued([*before.tokens, *more], len(before.tokens), before.parent)
        # The template has written the special tokens already.
        return Continued(self._tokenizer.encode(text, add_special_tokens=False))

    def _through(self, i: int, transcripts: Transcripts) -> Continued | None:
        """The conversation with message `i` as its last one, if that was sampled."""
        if self._messages[i].get("role") != "assistant":
            return None
        told = self._told[i]
        if told:
            messages = self._messages[:i]
            text = self._with_beginning(messages)
            asked = self._prompt(i, i, text, self._with_beginning, transcripts)
            return Continued([*asked.tokens, *told], 0, None)
        key = self.keys[i + 1] if self.keys is not None else None
        found = transcripts.find(key) if key is not None else None
        return Continued(found, 0, key) if found is not None else None

    def _with_beginning(self, messages: Sequence[Json]) -> str:
        """With the beginning of an answer."""
        return self._render(messages, add_generation_prompt=True, continue_final_message=False)

    def _ended(self, messages: Sequence[Json]) -> str:
        return self._render(messages, add_generation_prompt=False, continue_final_message=False)


def _told_tokens(message: Json, index: int) -> list[int]:
    """The tokens that a message brings along, as a choice told them."""
    tokens: Any = message.get(OWN_TOKENS) or []
    if tokens and message.get("role") != "assistant":
        path = f"messages[{index}].{OWN_TOKENS}"
        raise unsupported(path, "only what an assistant said was sampled; leave them out")
    is_list = isinstance(tokens, list)
    if not is_list or not all(_is_token(each) for each in cast("list[Any]", tokens)):
        path = f"messages[{index}].{OWN_TOKENS}"
        raise refusal(path, "they are a list of token ids, as a choice told them")
    return cast("list[int]", tokens)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN


def _keys(body: ChatBody) -> list[Key]:
    head = [body.session_id, body.tools, body.tool_choice == "none", body.chat_template_kwargs]
    keys = [_digest(b"", head)]
    for message in body.messages:
        keys.append(_next_key(keys[-1], message))
    return keys


def _next_key(key: Key, message: Json) -> Key:
    return _digest(key, _said(message) if message.get("role") == "assistant" else message)


def _said(message: Json) -> list[Any]:
    """What tells an answer from others: its text and its calls, however they are spaced."""
    content: Any = message.get("content") or ""
    calls: Any = message.get("tool_calls") or []
    return [content.strip() if isinstance(content, str) else content, list(map(_called, calls))]


def _called(call: Any) -> Any:  # noqa: ANN401 - JSON
    try:
        function = call["function"]
        arguments: Any = function["arguments"]
        is_text = isinstance(arguments, str)
        return [function["name"], json.loads(arguments or "{}") if is_text else arguments]
    except (TypeError, KeyError, ValueError):
        return call


def _digest(key: Key, value: object) -> Key:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(key + text.encode()).digest()
