"""The weight store: an actor and process of its own that owns the bytes of all versions."""
