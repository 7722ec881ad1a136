"""What the engine host and SGLang's scheduler processes tell each other."""
