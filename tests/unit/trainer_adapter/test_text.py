"""Text helpers need nothing of a tokenizer but three methods."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import pytest

from rolloutbus.bus.wire.messages.generation import SamplingParams
from rolloutbus.trainer_adapter.client.client import RolloutClient
from rolloutbus.trainer_adapter.client.core.results import NO_LOGPROBS, Delta
from rolloutbus.trainer_adapter.client.core.settings import ClientSettings
from rolloutbus.trainer_adapter.client.text import TextClient


class Utf8:
    """A token per byte."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [*([0] if add_special_tokens else []), *text.encode()]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        ids = [token for token in token_ids if token or not skip_special_tokens]
        return bytes(ids).decode(errors="replace")

    def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> str:  # noqa: ANN401
        said = "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation)
        return said + ("<assistant>" if kwargs["add_generation_prompt"] else "")


class Saying(RolloutClient):
    """Streams fixed deltas."""

    def __init__(self, *deltas: Delta) -> None:
        super().__init__(ClientSettings(name="c", router="ipc:///nowhere"))
        self._deltas = deltas

    async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Delta]:  # noqa: ANN401
        for delta in self._deltas:
            yield delta


def delta(start: int, raw: bytes, *, is_last: bool = False) -> Delta:
    tokens = np.array(list(raw), np.int32)
    return Delta("c/1", start, tokens, NO_LOGPROBS, 0, "stop" if is_last else None)


def test_a_conversation_becomes_a_prompt_for_the_assistant() -> None:
    prompt = TextClient(Saying(), Utf8()).chat_prompt([{"role": "user", "content": "hi"}])
    assert bytes(prompt) == b"<user>hi<assistant>"


def test_token_ids_are_decoded_with_special_tokens_or_without() -> None:
    text = TextClient(Saying(), Utf8())
    assert text.decode(np.array([0, 104, 105], np.int32)) == "hi"
    assert text.decode([0, 104, 105], skip_special_tokens=False) == "\0hi"


@pytest.mark.parametrize("cut", range(1, 8))
async def test_streamed_text_joins_to_the_whole_and_never_splits_a_character(cut: int) -> None:
    raw = "aé😀b".encode()
    client = Saying(delta(0, raw[:cut]), delta(cut, raw[cut:], is_last=True))
    pieces = [piece async for piece in TextClient(client, Utf8()).stream("?", SamplingParams())]
    assert "".join(pieces) == "aé😀b"
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
