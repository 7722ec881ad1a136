"""Rollouts out of journals: tables of them, and training from them."""
