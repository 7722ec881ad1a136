"""OpenAI's request bodies in, its responses out, on top of a client of the bus; no HTTP."""
