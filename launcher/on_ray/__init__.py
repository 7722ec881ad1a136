"""Fleets on a Ray cluster: Ray places and reserves, our supervisor starts, ends and restarts."""
