"""How new weights come to a worker."""
