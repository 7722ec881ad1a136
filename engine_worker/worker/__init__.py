"""The worker actor's process: its part on the bus, and its watch over the engine host."""
