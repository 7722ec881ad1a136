"""HTTP in front of a fleet: OpenAI's and SGLang's endpoints, served by a client of the bus."""
