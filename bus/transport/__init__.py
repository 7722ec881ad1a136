"""Ports that carry batches of entries, and the ZeroMQ sockets beneath them."""
