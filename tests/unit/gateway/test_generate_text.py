"""The text of a streamed `/generate`, which tells all so far in each event."""

from typing import Any

from rolloutbus.gateway.sglang.generate_body import generate_body, pieces_of, prompts_of
from tests.chat_templates import TEMPLATES, tokenizer_of

TEXT = "naïve café, 日本語 and 🙂: "


class CountingTokenizer:
    """A tokenizer, and how many tokens it was given to decode."""

    def __init__(self) -> None:
        self.whole: Any = tokenizer_of(*TEMPLATES["qwen"], words=["日本"])
        self.n_decoded = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self.whole.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.n_decoded += len(token_ids)
        return str(self.whole.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, conversation: object, **kwargs: object) -> object:
        raise NotImplementedError


def test_each_event_has_whole_characters_and_its_cost_does_not_grow() -> None:
    tokenizer = CountingTokenizer()
    text = TEXT * 150
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) > 4000
    pieces = pieces_of(
        prompts_of(generate_body({"text": "a", "stream": True}), tokenizer), tokenizer
    )
    for i, token in enumerate(tokens):
        pieces.add(i, [token], is_last=False)
        assert text.startswith(pieces.text)
    assert pieces.text == text
    assert tokenizer.n_decoded < 10 * len(tokens)
