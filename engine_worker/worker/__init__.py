"""The worker actor's process: what it says on the bus, and its watch over the engine host."""
