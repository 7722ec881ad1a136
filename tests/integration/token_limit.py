"""Stops fake engines after a number of tokens, so that a fault hits a request midway."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


class TokenLimit:
    """The file that fake engines look at before each step; see `FakeSettings.hold_file`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def at(self, n_tokens: int) -> Generator[None]:
        """No request gets more than `n_tokens` tokens until the block is left."""
        self.move(n_tokens)
        try:
            yield
        finally:
            self.path.unlink()

    def move(self, n_tokens: int) -> None:
        """Inside of the block: no more than `n_tokens` from now on."""
        draft = self.path.with_suffix(".new")
        draft.write_text(str(n_tokens))
        draft.replace(self.path)  # never half written
