"""The client's decisions, without sockets, clocks or tasks."""
