"""Whether generated tokens end with a stop text, for engines that draw their own tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rolloutbus.engine_worker.engines.shared.request import EndsText

BYTES_PER_CHAR = 4
"""Of UTF-8: a character may be spread over so many tokens."""

Decode = Callable[[Sequence[int]], str]


def decoder_of(model: Path) -> Decode | None:
    """What turns token ids to text, if the model's directory has a `tokenizer.json`.

    Raises:
        ValueError: it is broken.
    """
    path = model / "tokenizer.json"
    if not path.is_file():
        return None
    # It comes with transformers.
    from tokenizers import Tokenizer  # noqa: PLC0415

    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    # The package raises bare Exceptions.
    except Exception as error:
        raise ValueError(f"model: {path} is not a tokenizer: {error}") from error
    return lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=False)


def ends_with_text(decode: Decode, texts: Sequence[str]) -> EndsText:
    """A test for these texts, asked after each token.

    A text that began in an earlier attempt counts. Only as many tokens are read as can matter:
    whatever lies wholly before the last token was found when that was sampled.
    """
    n_read = BYTES_PER_CHAR * (max(len(text) for text in texts) + 1)

    def ends(tokens: Sequence[int]) -> bool:
        tail = decode(tokens[-n_read:])
        return any(text in tail for text in texts)

    return ends
