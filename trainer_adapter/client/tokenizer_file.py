"""A tokenizer from its `tokenizer.json`, without transformers."""

from collections.abc import Sequence
from pathlib import Path

from rolloutbus.bus.wire.errors import SettingsError


class TokenizerFile:
    """Text to token ids and back. Chat templates are not part of the file."""

    def __init__(self, path: Path) -> None:
        try:
            # An optional dependency.
            from tokenizers import Tokenizer  # noqa: PLC0415
        except ModuleNotFoundError:
            raise SettingsError(
                "a tokenizer needs the package tokenizers: pip install rolloutbus[transformers]"
            ) from None
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"tokenizer: cannot read {path}: {error.strerror}") from error
        try:
            self._tokenizer = Tokenizer.from_str(text)
        # The package raises bare Exceptions.
        except Exception as error:
            raise SettingsError(f"tokenizer: {path} is not a tokenizer: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def load_tokenizer(path: Path) -> TokenizerFile:
    """Read a `tokenizer.json`, or the one in a model's directory.

    Raises:
        SettingsError: it is not there, or is no tokenizer.
    """
    return TokenizerFile(path / "tokenizer.json" if path.is_dir() else path)
