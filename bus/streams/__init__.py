"""The stream plane: rows of tokens, and putting them together again."""
