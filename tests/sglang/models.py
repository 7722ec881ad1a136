"""Tiny models with random weights, and a tokenizer of one token per byte, made on the spot."""

# pyright: reportUnknownMemberType=false
# torch's and transformers' stubs leave parameters untyped.

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 512
SLOTS = 16
ENDLESS = 24_000
"""Tokens of a rollout that is still under way whenever a test looks; it has to be cut."""
MAX_CONTEXT = ENDLESS + 576
BOS, EOS, PAD = 1, 2, 0
FIRST_BYTE = 3
"""Token of the byte 0; the others follow."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT,
    "initializer_range": 0.15,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
}


def save_model(kind: str, path: Path) -> Path:
    """Write one of `KINDS`, always with the same weights, and the tokenizer to a directory."""
    torch.manual_seed(0)
    name, extra = KINDS[kind]
    config = getattr(transformers, name)(**SHAPE, **extra)
    model = cast("Any", transformers.AutoModelForCausalLM).from_config(config)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Each byte of UTF-8 is one token; the rest of the vocabulary has names of its own."""
    letters = _letters_of_bytes()
    names = ["<pad>", "<s>", "</s>", *letters]
    names += [f"<t{n}>" for n in range(len(names), VOCAB_SIZE)]
    core = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment] - a property of the binding
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment] - as above
    special = dict(zip(("pad_token", "bos_token", "eos_token"), names, strict=False))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)


def save_byte_tokenizer(path: Path, names: Mapping[int, str], **config: str) -> None:
    """Write `byte_tokenizer` with special tokens of these names, and more of its configuration."""
    byte_tokenizer().save_pretrained(path)
    for file in (path / "tokenizer.json", path / "tokenizer_config.json"):
        text = file.read_text()
        for token, name in names.items():
            text = text.replace(f"<t{token}>", name)
        file.write_text(text)
    written = json.loads((path / "tokenizer_config.json").read_text()) | config
    written["extra_special_tokens"] = [*names.values()]
    (path / "tokenizer_config.json").write_text(json.dumps(written))


def _letters_of_bytes() -> list[str]:
    """The letter that stands for each byte, 0 to 255, where bytes are tokens.

    Source: `bytes_to_unicode` of GPT-2's encoder.py: printable bytes stand for themselves.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(0x100)]
