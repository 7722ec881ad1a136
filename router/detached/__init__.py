"""Detached requests: they outlive their client's connection."""
