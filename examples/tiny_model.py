"""A causal language model of 0.33 million parameters and its tokenizer, made on the spot.

Both are ordinary Hugging Face directories: what serves them serves any other model too.
`python -m rolloutbus.examples.tiny_model DIRECTORY` writes them there.
"""

# pyright: reportUnknownMemberType=false
# The stubs of torch and transformers leave parameters untyped.

import argparse
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from rolloutbus.examples.task import VOCABULARY

MAX_POSITIONS = 128


def build_tiny_model(directory: Path, seed: int) -> None:
    """Write a randomly initialised model and its tokenizer into `directory`.

    The same seed gives the same weights. The caller's random state is left alone.
    """
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=VOCABULARY.index("<pad>"),
        bos_token_id=VOCABULARY.index("<s>"),
        eos_token_id=None,  # an answer ends when it has its full length
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(directory)
    _build_tokenizer().save_pretrained(directory)


def load_tiny_model(directory: Path) -> LlamaForCausalLM:
    """Read the model that `build_tiny_model` wrote, in float32, ready to be trained."""
    transformers_logging.disable_progress_bar()
    return LlamaForCausalLM.from_pretrained(
        directory, local_files_only=True, use_safetensors=True, dtype=torch.float32
    )


def _build_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {text: token for token, text in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))  # noqa: S106 - not a password
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        bos_token="<s>",  # noqa: S106
        model_max_length=MAX_POSITIONS,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a tiny model with random weights.")
    parser.add_argument("directory", type=Path, help="made if missing")
    parser.add_argument("--seed", type=int, default=0, help="of the weights; 0")
    options = parser.parse_args()
    build_tiny_model(options.directory, seed=options.seed)
