"""Chat templates of several shapes, and a tokenizer by which a text has several tokenisations."""

# pyright: reportUnknownMemberType=false
# transformers' stubs leave parameters untyped.

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "</s>", "[INST]", "[/INST]"]
PAIRS = ["ab", "ba", "aa", "an", "ok", "12", "21"]
"""Tokens of two characters, so that a text has several tokenisations."""

# As of Qwen: earlier reasoning is left out, and what follows a tool's result is written otherwise.
QWEN = (
    "{%- set ns = namespace(last=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last -%}{{- '<think>\n\n</think>\n\n' -}}"
    "{%- endif -%}{{- m.content.split('</think>')[-1] -}}"
    "{%- for c in m.tool_calls or [] -%}{{- '\n<tool_call>' + c.function|tojson -}}"
    "{{- '</tool_call>' -}}{%- endfor -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
# As of GLM: nothing ends an answer but the role of what follows.
GLM = (
    "{%- for m in messages -%}"
    "{{- ('<|assistant|>' if m.role == 'assistant' else '<|user|>') + '\n' + m.content|trim -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
# As of Mistral and DeepSeek: it wants a call before a tool's result, and arguments as text.
MISTRAL = (
    "{%- for m in messages -%}"
    "{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls -%}"
    "{{- raise_exception('no call') -}}{%- endif -%}"
    "{%- if m.role == 'assistant' -%}{%- if m.tool_calls -%}"
    "{{- m.tool_calls[0].function.name + m.tool_calls[0].function.arguments -}}{%- else -%}"
    "{{- m.content -}}{%- endif -%}{{- '</s>' -}}{%- else -%}"
    "{{- '[INST]' + m.content + '[/INST]' -}}{%- endif -%}{%- endfor -%}"
)
# As of Gemma: a tool's result is a part of the turn that called it.
GEMMA = (
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{{- '<|user|>' + m.content -}}"
    "{%- elif m.role == 'assistant' -%}{{- '<|assistant|>' -}}"
    "{%- set next = messages[loop.index0 + 1] if not loop.last else m -%}"
    "{%- if IS_LATE -%}{{- m.content -}}{%- endif -%}"
    "{%- if next.role == 'tool' -%}{{- '[INST]' + next.content + '[/INST]' -}}{%- endif -%}"
    "{%- if not IS_LATE -%}{{- m.content -}}{%- endif -%}"
    "{%- if next.role != 'tool' -%}{{- '</s>' -}}{%- endif -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt and messages[-1].role == 'user' -%}{{- '<|assistant|>' -}}"
    "{%- endif -%}"
)
LATE, EARLY = GEMMA.replace("IS_LATE", "true"), GEMMA.replace("IS_LATE", "false")
# As of models that see: a content is a list of parts, and a text is read letter by letter.
SMOL = (
    "{%- for m in messages -%}{{- '<|user|>' if m.role == 'user' else '<|assistant|>' -}}"
    "{%- for p in m.content -%}{%- if p.type == 'text' -%}{{- p.text -}}{%- endif -%}{%- endfor -%}"
    "{{- '</s>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
TEMPLATES = {
    "qwen": (QWEN, "<|im_end|>"),
    "glm": (GLM, "<|user|>"),
    "mistral": (MISTRAL, "</s>"),
    "gemma": (LATE, "</s>"),
    "smol": (SMOL, "</s>"),
}
"""Name -> template, and the token that ends an answer."""


def tokenizer_of(template: str, end: str, words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Letter by letter but for PAIRS and SPECIAL; each of `words` is a token of its own, too."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: n for n, name in enumerate([*SPECIAL, *letters, *PAIRS])}
    core = Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in PAIRS]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment] - a property of the binding
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment] - as above
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=end,
        additional_special_tokens=SPECIAL,
        chat_template=template,
    )
    tokenizer.add_tokens(list(words))
    return tokenizer
