"""The journal: an append-only record that survives crashes and tells what it lacks."""
