"""The shared language of all actors, and what carries it; knows nothing of models."""
