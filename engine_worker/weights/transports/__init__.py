"""The transports of weights, one per file: each brings the bytes of a version."""
