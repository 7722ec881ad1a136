"""The stream plane: rows of tokens, put together again by whoever listens."""
