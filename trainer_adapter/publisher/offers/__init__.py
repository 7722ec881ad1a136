"""Ways to a version's bytes that the trainer itself offers, beside the weight store."""
