"""Weights that come over a process group which a trainer made itself, as its engines' rank."""
