"""A model for pictures that says sentences: the next word is drawn as in its text.

Its layers take time and add nothing; the head holds which word follows which, how often.
"""

# pyright: reportUnknownMemberType=false
# torch's and transformers' stubs leave parameters untyped.

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

UNKNOWN = "<unk>"
WORD = re.compile(r"[A-Za-z][a-z'-]*[.,:;]?")
LEAST = -9.0
"""Logit of a word that never followed."""


def save_speaking_model(path: Path, text: str, n_words: int = 700) -> list[int]:
    """Write model and tokenizer to a directory.

    Args:
        path: the directory.
        text: what it is made of.
        n_words: of its vocabulary: those that the text has most often.

    Returns:
        Token ids of words that begin sentences.
    """
    words = WORD.findall(text)
    kept = [word for word, _ in Counter(words).most_common(n_words - 1)]
    ids = {word: n for n, word in enumerate([UNKNOWN, *kept])}
    core = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment] - a property of the binding
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token=UNKNOWN).save_pretrained(path)
    tokens = [ids[word] for word in words if word in ids]
    _model(n_words, Counter(pairwise(tokens))).save_pretrained(path)
    return [n for word, n in ids.items() if word[0].isupper() and word.isalpha()]


def _model(n_words: int, pairs: Counter[tuple[int, int]]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=n_words,
        hidden_size=n_words,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in cast("Any", model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(n_words))
        head = torch.full((n_words, n_words), LEAST)
        for (before, after), n in pairs.items():
            head[after, before] = torch.tensor(float(n)).log() + 1.0
        # The last norm makes a one of a word the root of their number.
        model.lm_head.weight.copy_(head / n_words**0.5)
    return model
