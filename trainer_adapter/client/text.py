"""Text and chat on top of token ids; the caller provides a tokenizer.

Nothing here knows a tokenizer library: `Tokenizer` says what is asked of one, and those of
transformers have it.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, Unpack

from rolloutbus.bus.cut_characters import CUT, n_whole_chars
from rolloutbus.bus.strict_calls import Described, shown, strict
from rolloutbus.bus.wire.errors import SettingsError
from rolloutbus.bus.wire.messages.generation import SamplingParams
from rolloutbus.trainer_adapter.client.asks import (
    GenerateOptions,
    SamplingLike,
    ask_of,
    sampling_of,
)
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import Int32s, Rollout


class TokenizerFile:
    """Text to token ids and back. Chat templates are not part of the file."""

    def __init__(self, path: Path) -> None:
        try:
            # An optional dependency.
            from tokenizers import Tokenizer  # noqa: PLC0415
        except ModuleNotFoundError:
            raise SettingsError(
                "a tokenizer needs the package tokenizers: pip install rolloutbus[transformers]"
            ) from None
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"tokenizer: cannot read {path}: {error.strerror}") from error
        try:
            self._tokenizer = Tokenizer.from_str(text)
        # The package raises bare Exceptions.
        except Exception as error:
            raise SettingsError(f"tokenizer: {path} is not a tokenizer: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def load_tokenizer(path: Path) -> TokenizerFile:
    """Read a `tokenizer.json`, or the one in a model's directory.

    Raises:
        SettingsError: it is not there, or is no tokenizer.
    """
    return TokenizerFile(path / "tokenizer.json" if path.is_dir() else path)


Decode = Callable[[list[int]], str]

MAX_UNREAD = 64
"""Tokens, far more than a character has, after which text is taken as it is: what never becomes a
character, or no text at all, must not be decoded again and again."""


class TextPieces:
    """Splits a growing text into pieces; holds back text that may change or begin a stop text."""

    def __init__(self, decode: Decode, stop: Sequence[str] = (), min_new_tokens: int = 0) -> None:
        """`stop`: texts that end it, unless they end within the first `min_new_tokens` tokens."""
        self._decode = decode
        self._stop = stop
        self._min_new_tokens = min_new_tokens
        self._n_exempt: int | None = None
        """Characters of those first tokens; None: not counted yet."""
        self._n_held = max((len(text) for text in stop), default=1) - 1
        self._tokens: list[int] = []
        self._text = ""
        """Text of the tokens read so far."""
        self._n_read = 0
        self._n_before = 0
        """Tokens before those that were read last: a word's beginning tells by its neighbour
        whether there is a space before it, so what is new is decoded after what was."""
        self._n_said = 0

    def add(self, start: int, tokens: Sequence[int], *, is_last: bool) -> str:
        """Takes the tokens from index `start` on; returns the new text.

        After lost work that had to be sampled anew, what was said already stays said.
        """
        if start < self._n_read:
            self._text, self._n_read, self._n_before = "", 0, 0
        if start < self._min_new_tokens:
            self._n_exempt = None
        self._tokens[start:] = tokens
        self._read(is_last=is_last)
        text = self._whole() if is_last else self.text
        piece = text[self._n_said :]
        self._n_said = max(self._n_said, len(text))
        return piece

    @property
    def text(self) -> str:
        """The text as it is now, without what is held back; after lost work the new one."""
        text = self._whole()
        return text[: max(0, len(text) - self._n_held)]

    def _whole(self) -> str:
        if not self._stop or len(self._tokens) <= self._min_new_tokens:
            return self._text
        if self._n_exempt is None:
            exempt = self._tokens[: self._min_new_tokens]
            self._n_exempt = n_whole_chars(self._decode, exempt)
        return without_stop(self._text, self._stop, self._n_exempt)

    def _read(self, *, is_last: bool) -> None:
        known = self._decode(self._tokens[self._n_before : self._n_read])
        text = self._decode(self._tokens[self._n_before :])
        is_whole = is_last or not text.endswith(CUT)
        n_unread = len(self._tokens) - self._n_read
        if (len(text) > len(known) and is_whole) or n_unread > MAX_UNREAD:
            self._text += text[len(known) :]
            self._n_before, self._n_read = self._n_read, len(self._tokens)


def without_stop(text: str, stop: Sequence[str], n_exempt: int = 0) -> str:
    """Returns the text up to the first stop text that ends after `n_exempt` characters."""
    # One that begins among them may end after them.
    found = [text.find(each, max(0, n_exempt - len(each) + 1)) for each in stop]
    ends = [at for at in found if at >= 0]
    return text[: min(ends)] if ends else text


def text_until_stop(
    decode: Decode, tokens: list[int], stop: Sequence[str], min_new_tokens: int
) -> str:
    """Returns the text of an output up to its first stop text.

    One that ends within the first `min_new_tokens` tokens ended nothing, and is kept.
    """
    text = decode(tokens)
    if not stop:
        return text
    return without_stop(text, stop, n_whole_chars(decode, tokens[:min_new_tokens]))


def trimmed_stops(sampling: SamplingParams) -> Sequence[str]:
    """The stop texts that are left out of a text; patterns never are, as with SGLang."""
    return () if sampling.no_stop_trim else sampling.stop


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


def require_tokenizer(tokenizer: object, parts: Sequence[str]) -> None:
    """Refuse what is no tokenizer: a path, a name, None.

    Args:
        tokenizer: what somebody gave as one.
        parts: names that it must have.

    Raises:
        SettingsError: it lacks one.
    """
    missing = [part for part in parts if not hasattr(tokenizer, part)]
    if missing:
        raise SettingsError(
            f"tokenizer is {shown(tokenizer)}, which has no {missing[0]!r}; it must be one such as "
            "transformers.AutoTokenizer.from_pretrained(DIRECTORY)"
        )


@dataclass(frozen=True, slots=True)
class TextRollout:
    """A rollout and its text."""

    text: str
    """Without special tokens, and up to the first stop text unless `no_stop_trim` was asked for."""
    rollout: Rollout


@strict(options=ask_of)
class TextClient:
    """Generates from text and from conversations through a RolloutClient."""

    def __init__(
        self, client: Annotated[RolloutClient, Described(_CLIENT)], tokenizer: Tokenizer
    ) -> None:
        """Nothing is sent yet.

        Args:
            client: connected.
            tokenizer: of transformers, with a chat template if there are to be chats.

        Raises:
            SettingsError: it is no tokenizer.
        """
        require_tokenizer(tokenizer, ("encode", "decode"))
        self._client = client
        self._tokenizer = tokenizer

    async def generate(
        self, text: str, sampling: SamplingLike, **options: Unpack[GenerateOptions]
    ) -> TextRollout:
        """Continue `text`; raises as `RolloutClient.generate`."""
        prompt = self._tokenizer.encode(text, add_special_tokens=True)
        return await self._said(prompt, sampling_of(sampling), options)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingLike,
        **options: Unpack[GenerateOptions],
    ) -> TextRollout:
        """Answer a conversation; raises as `RolloutClient.generate`."""
        prompt = self.chat_prompt(messages)
        return await self._said(prompt, sampling_of(sampling), options)

    async def stream(
        self, text: str, sampling: SamplingLike, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[str]:
        """Stream the continuation of `text` in pieces that join to the whole.

        A piece is held back while its last character may still change. After lost work that had
        to be sampled anew, what was said already stays said.
        """
        prompt = self._tokenizer.encode(text, add_special_tokens=True)
        asked = sampling_of(sampling)
        pieces = TextPieces(self.decode, trimmed_stops(asked), asked.min_new_tokens)
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

    async def _said(
        self, prompt: list[int], sampling: SamplingParams, options: GenerateOptions
    ) -> TextRollout:
        rollout = await self._client.generate(prompt, sampling, **options)
        tokens, stop = rollout.tokens.tolist(), trimmed_stops(sampling)
        text = text_until_stop(self.decode, tokens, stop, sampling.min_new_tokens)
        return TextRollout(text, rollout)
