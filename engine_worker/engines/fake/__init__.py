"""An engine without a model, for faults and scale."""
