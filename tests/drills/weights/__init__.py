"""Kills everybody who takes part in a weight update, in each of its phases."""
