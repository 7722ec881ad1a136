"""Engines that a worker can host, one adapter each, and what they are built from."""
