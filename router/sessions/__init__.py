"""Sessions with a slot at a worker."""
