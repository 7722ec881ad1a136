"""The language of the bus as types and as bytes: entries, messages, limits, errors, versions."""
