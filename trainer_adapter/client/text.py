"""Text and chat on top of token ids, for whoever brings a tokenizer.

Nothing here knows a tokenizer library: `Tokenizer` says what is asked of one, and those of
transformers have it.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, Unpack

from rolloutbus.bus.strict_calls import Described, strict
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.rollout import Int32s, Rollout
from rolloutbus.trainer_adapter.client.rollouts import GenerateOptions, SamplingLike, ask_of
from rolloutbus.trainer_adapter.client.text_pieces import TextPieces

Message = Mapping[str, str]
"""`role` and `content`."""
_CLIENT = "a RolloutClient, of connect(): there is no blocking TextClient"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids."""
        ...

    # Libraries annotate their results more widely than what one sequence gives: text.
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any:  # noqa: ANN401
        """Text."""
        ...

    # The keyword arguments of chat templates differ from model to model.
    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any:  # noqa: ANN401
        """The conversation as one text, with `tokenize=False`."""
        ...


@dataclass(frozen=True, slots=True)
class TextRollout:
    """A rollout and what it says."""

    text: str
    """Without special tokens."""
    rollout: Rollout


@strict(options=ask_of)
class TextClient:
    """Generates from text and from conversations through a RolloutClient."""

    def __init__(
        self, client: Annotated[RolloutClient, Described(_CLIENT)], tokenizer: Tokenizer
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer

    async def generate(
        self, text: str, sampling: SamplingLike, **options: Unpack[GenerateOptions]
    ) -> TextRollout:
        """Continue `text`; raises as `RolloutClient.generate`."""
        prompt = self._tokenizer.encode(text, add_special_tokens=True)
        return self._said(await self._client.generate(prompt, sampling, **options))

    async def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingLike,
        **options: Unpack[GenerateOptions],
    ) -> TextRollout:
        """Answer a conversation; raises as `RolloutClient.generate`."""
        prompt = self.chat_prompt(messages)
        return self._said(await self._client.generate(prompt, sampling, **options))

    async def stream(
        self, text: str, sampling: SamplingLike, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[str]:
        """Stream the continuation of `text` in pieces that join to the whole.

        A piece is held back while its last character may still change. After lost work that had
        to be sampled anew, what was said already stays said.
        """
        prompt = self._tokenizer.encode(text, add_special_tokens=True)
        pieces = TextPieces(self.decode)
        async for delta in self._client.stream(prompt, sampling, **options):
            is_last = delta.finish_reason is not None
            piece = pieces.add(delta.start, delta.tokens.tolist(), is_last=is_last)
            if piece:
                yield piece

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn."""
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        # The template has written the special tokens already.
        return self._tokenizer.encode(str(text), add_special_tokens=False)

    def decode(self, tokens: Sequence[int] | Int32s, *, skip_special_tokens: bool = True) -> str:
        """Token ids as text."""
        ids = [int(token) for token in tokens]
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _said(self, rollout: Rollout) -> TextRollout:
        return TextRollout(self.decode(rollout.tokens.tolist()), rollout)
