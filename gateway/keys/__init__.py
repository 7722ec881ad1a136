"""API keys of HTTP clients."""
