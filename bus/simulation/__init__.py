"""Virtual time, and a network in memory with delays and losses."""
