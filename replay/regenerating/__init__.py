"""Regenerating: recorded requests asked again of a live fleet, and compared."""
