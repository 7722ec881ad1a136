"""The router: the one table of members, and everything decided with it."""
