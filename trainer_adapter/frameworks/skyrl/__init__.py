"""SkyRL's trainers on a fleet, for SkyRL 0.2.0 and 0.3.0: engine, weight transfer, config words."""
