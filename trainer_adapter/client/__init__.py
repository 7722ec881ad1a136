"""The client of the bus: what programs call, and the shell around its core."""
