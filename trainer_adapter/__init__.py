"""The trainer's side of the bus: clients, the weight publisher and the weight store."""
