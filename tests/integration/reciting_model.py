"""A real model that says one thing after a cue: each token's successor is in its weights."""

# pyright: reportUnknownMemberType=false
# torch's and transformers' stubs leave parameters untyped.

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

UNKNOWN, END = "<unk>", "</s>"
SIZE = 128
"""Of the vocabulary, and of the hidden state: a place for each token."""
MAX_CONTEXT = 16_384
UNDER_WAY = 12_000
"""Tokens of an answer that goes on whenever a test looks; it has to be cut."""
LINES = {
    "hello": "Good day to you",
    "weather": 'Let me see <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}} '
    "</tool_call>",
    "think": "<think> is it so </think> Yes indeed",
    "broken": 'Wait <tool_call>{"name":"oops", </tool_call>',
}
"""Cue -> what is said after it. A word has one successor, wherever it stands: no two lines share
words, but for the last one."""
CHAT_TEMPLATE = (
    "{% if tools %}tools {% for t in tools %}{{ t['function']['name'] }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{{ p['text'] if p['type'] == 'text' else p['type'] }} "
    "{% endfor %}{% endif %} {% endfor %}"
)
"""A cue at the end of the last message begins the answer."""


def save_reciting_model(path: Path) -> PreTrainedTokenizerFast:
    """Write model and tokenizer to a directory; returns the tokenizer."""
    lines = {cue: words.split() for cue, words in LINES.items()}
    words = {UNKNOWN, END, *lines, *(word for line in lines.values() for word in line)}
    ids = {word: n for n, word in enumerate([UNKNOWN, END, *sorted(words - {UNKNOWN, END})])}
    core = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment] - a property of the binding
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token=UNKNOWN, eos_token=END, chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(path)
    following = dict.fromkeys(ids, END)
    for cue, line in lines.items():
        following |= dict(zip([cue, *line[:-1]], line, strict=True))
    successors = {ids[word]: [ids[after]] for word, after in following.items()}
    model_of_successors(successors, SIZE, ends=[ids[END]]).save_pretrained(path)
    return tokenizer


def model_of_successors(
    following: Mapping[int, Collection[int]], size: int, ends: list[int]
) -> LlamaForCausalLM:
    """A model whose next token is one of the last one's successors, each as likely as the others.

    Its layers add nothing: what it sees last decides. `size`: of vocabulary and hidden state.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_CONTEXT,
        eos_token_id=ends,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in cast("Any", model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        for token, successors in following.items():
            model.lm_head.weight[list(successors), token] = 10.0
    return model
