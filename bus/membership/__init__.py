"""How workers and stores belong to a fleet: hello, heartbeats, leases, endings that arrive."""
