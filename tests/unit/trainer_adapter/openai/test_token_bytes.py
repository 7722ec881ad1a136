"""Bytes of tokens in a chat's logprobs: those of several join to what they are parts of."""

# pyright: reportUnknownMemberType=false
# transformers' stubs leave parameters untyped.

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rolloutbus.bus.cut_characters import CUT
from rolloutbus.trainer_adapter.client.core.results import Rollout
from rolloutbus.trainer_adapter.openai.answers import ChatAnswers, token_texts
from rolloutbus.trainer_adapter.openai.bodies import ChatBody, body_of
from tests.chat_templates import TEMPLATES, tokenizer_of

TEXT = f"naïve 日本語 and 🙂{CUT}"
JSON_BODY = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1}


class BareTokenizer:
    """Has no more than every tokenizer must have: no names of tokens."""

    all_special_ids: Sequence[int] = ()

    def __init__(self, whole: PreTrainedTokenizerFast) -> None:
        self.decode = whole.decode


def byte_level() -> PreTrainedTokenizerFast:
    """A token for each byte, and two that begin a character without ending it."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġæ", "ä½łä"]
    made = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, []))
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment] - a property of the binding
    return PreTrainedTokenizerFast(tokenizer_object=made)


def sentencepiece() -> PreTrainedTokenizerFast:
    """Letters, and names for bytes, as Llama 2 and Gemma have them."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "ä", "日"]
    names += [CUT, f"b{CUT}", f"▁{CUT}"]
    made = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, []))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])  # type: ignore[assignment] - as above
    return PreTrainedTokenizerFast(tokenizer_object=made)


def told_of(tokenizer: Any, tokens: Sequence[int]) -> list[bytes | None]:  # noqa: ANN401 - any of them
    """Bytes of these tokens, which are also the likeliest in their places; whole and streamed."""
    n = len(tokens)
    rollout = Rollout(
        rid="c/1",
        tokens=np.array(tokens, np.int32),
        logprobs=np.zeros(n, np.float32),
        behaviour_logprobs=np.zeros(n, np.float32),
        version_runs=[(3, n)],
        finish_reason="length",
        worker="w0",
        n_prompt_tokens=4,
        n_attempts=1,
        n_resumed=0,
        queue_ms=0.0,
        run_ms=0.0,
        arrays={
            "top_token_ids": np.array(tokens, np.int32)[:, None],
            "top_logprobs": np.zeros((n, 1), np.float32),
        },
    )
    body = body_of(JSON_BODY, ChatBody)
    answers = ChatAnswers(body, token_texts(body, tokenizer, ()), lambda: None)
    whole = answers.choice(0, rollout)["logprobs"]["content"]
    assert answers.stream(0).closing(rollout)["logprobs"]["content"] == whole
    for each in whole:
        assert [top["bytes"] for top in each["top_logprobs"]] == [each["bytes"]]
    return [None if each["bytes"] is None else bytes(each["bytes"]) for each in whole]


def test_bytes_of_byte_level_tokens_join_to_the_text() -> None:
    tokenizer = tokenizer_of(*TEMPLATES["qwen"], words=["日本"])
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    told = told_of(tokenizer, tokens)
    assert b"".join(each or b"?" for each in told) == TEXT.encode()
    assert "日本".encode() in told


@pytest.mark.parametrize(
    ("name", "told"),
    [("Ġæ", b" \xe6"), ("ä½łä", b"\xe4\xbd\xa0\xe4"), ("a", b"a"), ("ł", b"\xa0")],
)
def test_a_byte_level_token_has_its_own_bytes(name: str, told: bytes) -> None:
    tokenizer = byte_level()
    assert told_of(tokenizer, [tokenizer.get_vocab()[name]]) == [told]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("<0xE4>", b"\xe4"),
        ("<0x41>", b"A"),
        ("<0xFF>", b"\xff"),
        ("ä", "ä".encode()),
        ("日", "日".encode()),
        (CUT, CUT.encode()),
        (f"b{CUT}", f"b{CUT}".encode()),
        (f"▁{CUT}", None),  # a name of neither kind
    ],
)
def test_a_byte_of_sentencepiece_is_that_byte(name: str, told: bytes | None) -> None:
    tokenizer = sentencepiece()
    assert told_of(tokenizer, [tokenizer.get_vocab()[name]]) == [told]


def test_what_the_tokenizer_does_not_tell_is_null() -> None:
    whole = byte_level()
    names = whole.get_vocab()
    assert told_of(BareTokenizer(whole), [names["a"], names["ł"]]) == [b"a", None]
