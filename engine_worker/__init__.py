"""The worker actor: one engine on the bus, and the process that holds it."""
