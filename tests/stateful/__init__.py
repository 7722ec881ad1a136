"""State machines that Hypothesis drives, and whose failures it makes small."""
