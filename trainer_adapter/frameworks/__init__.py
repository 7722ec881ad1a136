"""Trainer frameworks on the bus: a module per framework, which alone imports it."""
