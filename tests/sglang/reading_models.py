"""Tiny models that read and do not write, with random weights: one gives classes, one ranks."""

# pyright: reportUnknownMemberType=false
# torch's and transformers' stubs leave parameters untyped.

from pathlib import Path
from typing import Any, cast

import torch
import transformers
from tokenizers.processors import TemplateProcessing

from tests.sglang.models import BOS, EOS, PAD, SHAPE, VOCAB_SIZE, byte_tokenizer

N_CLASSES = 3
BERT_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "num_labels": 1,
    # As in published checkpoints; SGLang looks for it.
    "position_embedding_type": "absolute",
}


def save_classifier(path: Path) -> Path:
    """Write a Llama that gives logits of some classes."""
    torch.manual_seed(0)
    kinds = cast("Any", transformers)
    config = kinds.LlamaConfig(**SHAPE, num_labels=N_CLASSES)
    kinds.LlamaForSequenceClassification(config).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def save_cross_encoder(path: Path) -> Path:
    """Write a BERT that tells how well two texts fit, and a tokenizer of pairs."""
    torch.manual_seed(0)
    kinds = cast("Any", transformers)
    config = kinds.BertConfig(**BERT_SHAPE, initializer_range=0.3)
    kinds.BertForSequenceClassification(config).save_pretrained(path)
    pair_tokenizer().save_pretrained(path)
    return path


def pair_tokenizer() -> Any:  # noqa: ANN401 - untyped
    """Bytes, between marks, and which text each belongs to."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", BOS), ("</s>", EOS)],
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer
