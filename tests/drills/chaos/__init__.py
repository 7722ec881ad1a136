"""Chaos: real processes over real sockets, broken on purpose; every request is accounted for."""
