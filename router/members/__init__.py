"""Members and clients of the bus, their rights, and the commands that the router sends them."""
