"""What a subscriber makes of the streams it follows: gaps, repairs, and what its reader is told."""
