"""What is said on the bus, as types and as bytes: entries, messages, limits, errors, versions."""
