"""Weight updates: transactions over the workers of a policy."""
