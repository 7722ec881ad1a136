"""Tests; `tests/unit`, `conversation`, `conformance`, `architecture` need no socket."""
