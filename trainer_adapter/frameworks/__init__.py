"""Trainer frameworks on the bus: a module or folder for each, which alone imports it."""
