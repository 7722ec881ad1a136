"""Turns: a router's decisions, written down and made again by a fresh core."""
